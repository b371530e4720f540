// SPDX-License-Identifier: BSD-3-Clause
#include "compressor/plain_compressor.h"

#include <ATen/ATen.h>

#include <utility>

namespace powersgd {

PlainCompressor::PlainCompressor(BucketSpec spec, std::vector<ParameterStatePtr> states,
                                 std::shared_ptr<StepCounter> step_counter)
    : spec_(std::move(spec)),
      step_counter_(std::move(step_counter)),
      stages_(require_stages(spec_.device.type())),
      states_(std::move(states)) {}

at::Tensor& PlainCompressor::project(const at::Tensor& gradient, const StepInfo& step) {
  spec_.check(gradient);
  if (!prepared_) prepare();
  const double residual_scale = states_.begin_step(step);
  tables_.begin_step(gradient, step, residual_scale);
  if (!spec_.options.warm_start) {
    kernels::Bucket start = tables_.bucket();
    if (step.same_start) start.step = 0;
    stages_.random_start(start);
  }
  stages_.project(tables_.bucket());
  states_.projected(gradient);
  if (step.drop_residual) p_wire_.drop_rounding();
  return p_wire_.pack();
}

void PlainCompressor::orthogonalize() {
  p_wire_.unpack();
  stages_.orthogonalize(tables_.bucket());
}

at::Tensor& PlainCompressor::back_project() {
  stages_.back_project(tables_.bucket());
  at::Tensor& packed = q_wire_.pack();
  // The rounding was not sent: the residual keeps it, because it is made of q_local.
  if (q_wire_.rounds()) at::_foreach_copy_(q_local_, q_sent_);
  return packed;
}

void PlainCompressor::reconstruct() {
  q_wire_.unpack();
  stages_.reconstruct(tables_.bucket());
  states_.end_step();
}

int64_t PlainCompressor::payload_bytes() const {
  return spec_.wire_bytes(spec_.plan.p_numel + spec_.plan.q_numel);
}

void PlainCompressor::prepare() {
  const BucketPlan& plan = spec_.plan;
  states_.allocate(spec_);
  at::Tensor p_payload = at::zeros({plan.p_numel}, spec_.factor_options());
  at::Tensor q_payload = at::zeros({plan.q_numel}, spec_.factor_options());
  tables_ = BucketTables(spec_, states_.of_matrices(), step_counter_.get(), p_payload, q_payload);
  p_wire_ = WirePayload(p_payload, spec_.wire_type(), plan.counts_offset());
  q_wire_ = WirePayload(q_payload, spec_.wire_type(), plan.q_numel);
  if (p_wire_.rounds()) {
    const at::Tensor raw = p_payload.narrow(0, plan.raw_offset(), spec_.raw_numel());
    p_wire_.carry_rounding(raw, at::zeros_like(raw));
    q_local_.clear();
    q_sent_.clear();
    for (size_t i = 0; i < plan.matrices.size(); ++i) {
      const at::Tensor& q = states_.of_matrices()[i]->q_local;
      q_local_.push_back(q);
      q_sent_.push_back(q_payload.narrow(0, plan.matrices[i].q_offset, q.numel()).view(q.sizes()));
    }
  }
  prepared_ = true;
}

}  // namespace powersgd
