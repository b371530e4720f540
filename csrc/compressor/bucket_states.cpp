// SPDX-License-Identifier: BSD-3-Clause
#include "compressor/bucket_states.h"

#include <ATen/ATen.h>

#include "compressor/streams.h"

namespace powersgd {
namespace {

at::Tensor gradient_of(const PlannedMatrix& matrix, const at::Tensor& bucket) {
  const int64_t numel = matrix.shape.rows * matrix.shape.cols;
  return bucket.view({-1}).narrow(0, matrix.gradient_offset, numel);
}

}  // namespace

void BucketStates::allocate(const BucketSpec& spec) {
  std::vector<ParameterState::Layout> missing;
  for (size_t i = 0; i < states_.size(); ++i) {
    if (states_[i]->is_on(spec.device)) continue;
    if (states_[i]->allocated()) {
      states_[i]->move_to(spec.device);
      continue;
    }
    const PlannedMatrix& matrix = spec.plan.matrices[i];
    missing.push_back({states_[i].get(), matrix.shape, matrix.rank});
  }
  ParameterState::allocate(missing, spec.options, spec.device);
}

void BucketStates::begin_step(const BucketPlan& plan, const at::Tensor& gradient,
                              const StepInfo& step) {
  forget_step();  // one that failed in project
  ParameterState::keep_before_step(states_);
  for (size_t i = 0; i < states_.size(); ++i) {
    states_[i]->last_step = step.step;
    const PlannedMatrix& matrix = plan.matrices[i];
    if (step.uses.empty() || step.uses[static_cast<size_t>(matrix.parameter)] != Use::kStale) {
      continue;
    }
    Stale& stale = stale_.emplace_back();
    stale.matrix = i;
    stale.gradient = gradient_of(matrix, gradient);
    stale.gradient_before = stale.gradient.clone();
    for (const at::Tensor& tensor : states_[i]->step_tensors()) {
      stale.state_before.push_back(tensor.clone());
    }
  }
}

void BucketStates::end_step(const BucketPlan& plan, const at::Tensor& p_payload) {
  for (const Stale& stale : stale_) {
    const at::Tensor unused = p_payload.select(0, plan.matrices[stale.matrix].use_offset).eq(0);
    const auto put_back = [&](const at::Tensor& now, const at::Tensor& before) {
      use_on_current_stream(before);
      now.copy_(at::where(unused, before, now));
    };
    put_back(stale.gradient, stale.gradient_before);
    const std::vector<at::Tensor> state = states_[stale.matrix]->step_tensors();
    for (size_t i = 0; i < state.size(); ++i) put_back(state[i], stale.state_before[i]);
  }
  forget_step();
}

void BucketStates::rollback(const BucketPlan& plan) {
  if (!gradient_.defined()) return;
  for (size_t i = 0; i < states_.size(); ++i) {
    states_[i]->take_back(gradient_of(plan.matrices[i], gradient_));
  }
  for (const Stale& stale : stale_) {
    at::_foreach_copy_(states_[stale.matrix]->step_tensors(), stale.state_before);
  }
  forget_step();
}

void BucketStates::forget_step() {
  gradient_ = at::Tensor();
  stale_.clear();
}

}  // namespace powersgd
