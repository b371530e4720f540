// SPDX-License-Identifier: BSD-3-Clause
#include "compressor/alternating_compressor.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

namespace powersgd {
namespace {

// Returns the part of a payload at each offset, in the sizes of the tensor in `like`.
std::vector<at::Tensor> parts_of(const at::Tensor& payload, const std::vector<int64_t>& offsets,
                                 const std::vector<at::Tensor>& like) {
  std::vector<at::Tensor> parts;
  for (size_t i = 0; i < like.size(); ++i) {
    parts.push_back(payload.narrow(0, offsets[i], like[i].numel()).view(like[i].sizes()));
  }
  return parts;
}

}  // namespace

AlternatingCompressor::AlternatingCompressor(BucketSpec spec, std::vector<ParameterStatePtr> states,
                                             std::shared_ptr<StepCounter> step_counter)
    : spec_(std::move(spec)),
      step_counter_(std::move(step_counter)),
      stages_(require_stages(spec_.device.type())),
      states_(std::move(states)) {}

at::Tensor& AlternatingCompressor::project(const at::Tensor& gradient, const StepInfo& step) {
  spec_.check(gradient);
  if (!prepared_) prepare();
  const double residual_scale = states_.begin_step(step);
  tables_.begin_step(gradient, step, residual_scale);
  choose_factor();
  return sends_q_ ? project_q(gradient) : project_p(gradient);
}

at::Tensor& AlternatingCompressor::project_p(const at::Tensor& gradient) {
  stages_.project(tables_.bucket());
  states_.projected(gradient);
  at::Tensor& packed = p_wire_.pack();
  if (p_wire_.rounds()) at::_foreach_copy_(p_local_, p_sent_);
  for (const ParameterStatePtr& state : states_.of_matrices()) state->sent_p = true;
  return packed;
}

at::Tensor& AlternatingCompressor::project_q(const at::Tensor& gradient) {
  stages_.project_transposed(tables_.bucket());
  states_.projected(gradient);
  for (const ParameterStatePtr& state : states_.of_matrices()) state->sent_p = false;
  at::Tensor& packed = q_wire_.pack();
  if (q_wire_.rounds()) at::_foreach_copy_(q_local_, q_sent_);
  return packed;
}

// A parameter that comes from another bucket, or was loaded, may be due for the other factor. All
// parameters then send P, because that needs Q alone.
void AlternatingCompressor::choose_factor() {
  const auto sent_p = [](const ParameterStatePtr& state) { return state->sent_p; };
  const std::vector<ParameterStatePtr>& states = states_.of_matrices();
  sends_q_ = std::all_of(states.begin(), states.end(), sent_p);
  if (sends_q_) return;
  for (const ParameterStatePtr& state : states) {
    if (!state->sent_p) continue;
    state->set_residual(state->residual());
    state->sent_p = false;
    state->q_local.zero_();
  }
}

void AlternatingCompressor::orthogonalize() {
  if (sends_q_) {
    q_wire_.unpack();
    kernels::Bucket transposed = transposed_.bucket();
    transposed.step = tables_.bucket().step;
    stages_.orthogonalize(transposed);
  } else {
    p_wire_.unpack();
    stages_.orthogonalize(tables_.bucket());
  }
}

at::Tensor& AlternatingCompressor::back_project() {
  TORCH_INTERNAL_ASSERT(false, "this step sends one factor");
}

void AlternatingCompressor::reconstruct() {
  if (sends_q_) {
    stages_.reconstruct(bucket_of(kReconstructQ));
  } else {
    at::_foreach_copy_(fixed_q_parts_, q_warm_);
    stages_.reconstruct(bucket_of(kReconstructP));
  }
  states_.end_step();
}

kernels::Bucket AlternatingCompressor::bucket_of(View view) const {
  kernels::Bucket bucket = tables_.bucket();
  bucket.matrices = static_cast<const kernels::Matrix*>(view_tables_[view].data_ptr());
  if (view == kReconstructP) bucket.q_payload = fixed_q_.data_ptr();
  return bucket;
}

int64_t AlternatingCompressor::payload_bytes() const {
  const BucketPlan& plan = spec_.plan;
  const int64_t q_numel = plan.q_numel + plan.p_numel - plan.raw_offset();
  return spec_.wire_bytes(sends_q_ ? q_numel : plan.p_numel);
}

void AlternatingCompressor::prepare() {
  states_.allocate(spec_);
  make_payloads();
  tables_ = BucketTables(spec_, states_.of_matrices(), step_counter_.get(), p_payload_, q_payload_);
  for (size_t view = 0; view < kViews; ++view) {
    view_tables_[view] = upload_matrices(table_of(static_cast<View>(view)), spec_.device);
  }
  make_transposed();
  prepared_ = true;
}

void AlternatingCompressor::make_payloads() {
  for (auto* parts : {&q_warm_, &p_local_, &q_local_}) parts->clear();
  for (const ParameterStatePtr& state : states_.of_matrices()) {
    q_warm_.push_back(state->q_warm);
    p_local_.push_back(state->p_local);
    q_local_.push_back(state->q_local);
  }
  const BucketPlan& plan = spec_.plan;
  const int64_t room = std::max(plan.raw_offset(), plan.q_numel);
  const int64_t tail = plan.p_numel - plan.raw_offset();
  payload_ = at::zeros({room + tail}, spec_.factor_options());
  p_payload_ = payload_.narrow(0, room - plan.raw_offset(), plan.p_numel);
  q_payload_ = payload_.narrow(0, room - plan.q_numel, plan.q_numel + tail);
  p_wire_ = WirePayload(p_payload_, spec_.wire_type(), plan.counts_offset());
  q_wire_ = WirePayload(q_payload_, spec_.wire_type(), plan.q_numel + spec_.raw_numel());
  if (p_wire_.rounds()) {
    const at::Tensor raw = payload_.narrow(0, room, spec_.raw_numel());
    const at::Tensor raw_residual = at::zeros_like(raw);
    p_wire_.carry_rounding(raw, raw_residual);
    q_wire_.carry_rounding(raw, raw_residual);
  }
  fixed_q_ = at::zeros({plan.q_numel}, spec_.factor_options());
  std::vector<int64_t> p_offsets, q_offsets;
  for (const PlannedMatrix& matrix : plan.matrices) {
    p_offsets.push_back(matrix.p_offset);
    q_offsets.push_back(matrix.q_offset);
  }
  p_sent_ = parts_of(p_payload_, p_offsets, p_local_);
  q_sent_ = parts_of(q_payload_, q_offsets, q_warm_);
  fixed_q_parts_ = parts_of(fixed_q_, q_offsets, q_warm_);
}

// The bucket by which orthogonalize treats Q: its matrices are transposed, and its P payload is the
// Q payload.
void AlternatingCompressor::make_transposed() {
  kernels::Bucket transposed = tables_.bucket();
  transposed.transposed = true;
  transposed.p_payload = q_payload_.data_ptr();
  transposed.p_numel = q_payload_.numel();
  std::vector<kernels::Matrix> table = matrix_table(spec_.plan, states_.of_matrices());
  for (kernels::Matrix& matrix : table) {
    matrix.rows = matrix.cols;
    matrix.p_offset = matrix.q_offset;
    matrix.p_hat = matrix.q_warm;
    matrix.active_offset += spec_.plan.q_numel - spec_.plan.raw_offset();
  }
  transposed_ = BucketTables(transposed, table, {}, spec_.device);
}

std::vector<kernels::Matrix> AlternatingCompressor::table_of(View view) const {
  std::vector<kernels::Matrix> table = matrix_table(spec_.plan, states_.of_matrices());
  for (size_t i = 0; i < table.size(); ++i) {
    kernels::Matrix& matrix = table[i];
    matrix.q_warm = nullptr;
    if (view == kReconstructP) matrix.p_hat = p_sent_[i].data_ptr();
  }
  return table;
}

}  // namespace powersgd
