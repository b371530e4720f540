// SPDX-License-Identifier: BSD-3-Clause
#include "compressor/raw_rounding.h"

#include <ATen/ATen.h>

#include <utility>

namespace powersgd {

RawRounding::RawRounding(const BucketSpec& spec, std::vector<ParameterStatePtr> states)
    : parameters_(spec.plan.raw_parameters), states_(std::move(states)) {
  rounding_ = at::zeros({spec.plan.raw_numel()}, spec.factor_options());
  before_ = at::zeros_like(rounding_);
  const at::Tensor scales = at::ones({3}, at::device(spec.device).dtype(at::kDouble));
  units_ = scales.select(0, 0);
  new_units_ = scales.select(0, 1);
  factor_ = scales.select(0, 2);
  is_skipped_ = at::zeros({}, at::device(spec.device).dtype(at::kBool));
  bool first = true;
  for (size_t i = 0; i < states_.size(); ++i) {
    const bool sets_units = first && states_[i]->rounding.defined();
    take_over(i, sets_units);
    first = first && !sets_units;
  }
}

void RawRounding::take_over(size_t index, bool sets_units) {
  const PlannedRawParameter& planned = parameters_[index];
  ParameterState& state = *states_[index];
  const at::Tensor part = rounding_.narrow(0, planned.offset, planned.numel);
  const at::Tensor& found = state.rounding;
  if (found.defined() && found.data_ptr() == part.data_ptr()) return;
  if (found.defined() && found.numel() == part.numel() && found.device() == part.device()) {
    if (sets_units) units_.copy_(state.grad_scale);
    part.copy_(found).mul_(units_.div(state.grad_scale));
  } else {
    part.zero_();
  }
  state.rounding = part;
  state.rounding_before = before_.narrow(0, planned.offset, planned.numel);
  state.grad_scale = units_;
}

void RawRounding::begin_step(const StepInfo& step, bool is_captured) {
  for (size_t i = 0; i < states_.size(); ++i) {
    take_over(i, /*sets_units=*/false);
    states_[i]->last_step = static_cast<int64_t>(step.step);
  }
  rescale(step, is_captured);
  before_.copy_(rounding_);
}

// The host may know that the units are still the same.
void RawRounding::rescale(const StepInfo& step, bool is_captured) {
  was_captured_ = was_captured_ || is_captured;
  if (step.loss_scale.defined()) {
    known_units_.reset();
    new_units_.copy_(step.loss_scale.reshape({}));
  } else {
    if (!was_captured_ && known_units_ == step.grad_scale) return;
    known_units_ = step.grad_scale;
    new_units_.fill_(step.grad_scale);
  }
  at::div_out(factor_, new_units_, units_);
  rounding_.mul_(factor_);
  units_.copy_(new_units_);
}

void RawRounding::end_step(const at::Tensor& skipped) {
  if (skipped.is_cpu()) {
    if (skipped.item<int>() != 0) rollback();
    return;
  }
  at::ne_out(is_skipped_, skipped, 0);
  at::where_out(rounding_, is_skipped_, before_, rounding_);
}

void RawRounding::rollback() { rounding_.copy_(before_); }

}  // namespace powersgd
