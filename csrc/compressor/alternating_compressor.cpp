// SPDX-License-Identifier: BSD-3-Clause
#include "compressor/alternating_compressor.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "compressor/bucket_tables.h"
#include "compressor/stages.h"

namespace powersgd {
namespace {

// The places of `like` in a payload, in its sizes.
std::vector<at::Tensor> parts_of(const at::Tensor& payload, const std::vector<int64_t>& offsets,
                                 const std::vector<at::Tensor>& like) {
  std::vector<at::Tensor> parts;
  for (size_t i = 0; i < like.size(); ++i) {
    parts.push_back(payload.narrow(0, offsets[i], like[i].numel()).view(like[i].sizes()));
  }
  return parts;
}

}  // namespace

void AlternatingCompressor::prepare() {
  for (const ParameterStatePtr& state : states_) {
    q_warm_.push_back(state->q_warm);
    p_local_.push_back(state->p_local);
    q_local_.push_back(state->q_local);
  }
  make_payloads();
  bucket_.p_payload = p_payload_.data_ptr();
  bucket_.q_payload = q_payload_.data_ptr();
  owned_ = set_tables(bucket_, stages_, matrix_table(), raw_table(), device_);
  for (size_t view = 0; view < kViews; ++view) {
    tables_[view] = upload_matrices(table_of(static_cast<View>(view)), device_);
  }
  make_transposed();
}

void AlternatingCompressor::make_payloads() {
  const int64_t room = std::max(plan_.raw_offset(), plan_.q_numel);
  const int64_t tail = plan_.p_numel - plan_.raw_offset();
  const int64_t raw = plan_.counts_offset() - plan_.raw_offset();
  payload_ = at::zeros({room + tail}, factor_options());
  p_payload_ = payload_.narrow(0, room - plan_.raw_offset(), plan_.p_numel);
  q_payload_ = payload_.narrow(0, room - plan_.q_numel, plan_.q_numel + tail);
  p_wire_ = WirePayload(p_payload_, wire_type(), plan_.counts_offset());
  q_wire_ = WirePayload(q_payload_, wire_type(), plan_.q_numel + raw);
  if (p_wire_.rounds()) keep_rounding_of(payload_.narrow(0, room, raw));
  fixed_q_ = at::zeros({plan_.q_numel}, factor_options());
  std::vector<int64_t> p_offsets, q_offsets;
  for (const PlannedMatrix& matrix : plan_.matrices) {
    p_offsets.push_back(matrix.p_offset);
    q_offsets.push_back(matrix.q_offset);
  }
  p_sent_ = parts_of(p_payload_, p_offsets, p_local_);
  q_sent_ = parts_of(q_payload_, q_offsets, q_warm_);
  fixed_q_parts_ = parts_of(fixed_q_, q_offsets, q_warm_);
}

// orthogonalize of Q: of a bucket whose matrices are transposed, and whose P payload is Q's.
void AlternatingCompressor::make_transposed() {
  transposed_ = bucket_;
  transposed_.transposed = true;
  transposed_.p_payload = q_payload_.data_ptr();
  transposed_.p_numel = q_payload_.numel();
  std::vector<kernels::Matrix> table = matrix_table();
  for (kernels::Matrix& matrix : table) {
    matrix.rows = matrix.cols;
    matrix.p_offset = matrix.q_offset;
    matrix.p_hat = matrix.q_warm;
    matrix.active_offset += plan_.q_numel - plan_.raw_offset();
  }
  transposed_owned_ = set_tables(transposed_, stages_, table, {}, device_);
}

std::vector<kernels::Matrix> AlternatingCompressor::table_of(View view) const {
  std::vector<kernels::Matrix> table = matrix_table();
  for (size_t i = 0; i < table.size(); ++i) {
    kernels::Matrix& matrix = table[i];
    matrix.q_warm = nullptr;
    if (view == kReconstructP) matrix.p_hat = p_sent_[i].data_ptr();
  }
  return table;
}

kernels::Bucket AlternatingCompressor::seen(View view) const {
  kernels::Bucket bucket = bucket_;
  bucket.matrices = static_cast<const kernels::Matrix*>(tables_[view].data_ptr());
  if (view == kReconstructP) bucket.q_payload = fixed_q_.data_ptr();
  return bucket;
}

at::Tensor& AlternatingCompressor::project_gradient(const at::Tensor& gradient, const StepInfo&) {
  settle_if_mixed();
  return sends_q_ ? project_q(gradient) : project_p(gradient);
}

at::Tensor& AlternatingCompressor::project_p(const at::Tensor& gradient) {
  stages_.project(bucket_);
  begin_step(gradient);
  at::Tensor& packed = pack(p_wire_);
  if (p_wire_.rounds()) at::_foreach_copy_(p_local_, p_sent_);
  for (const ParameterStatePtr& state : states_) state->sent_p = true;
  return packed;
}

at::Tensor& AlternatingCompressor::project_q(const at::Tensor& gradient) {
  stages_.project_transposed(bucket_);
  begin_step(gradient);
  for (const ParameterStatePtr& state : states_) state->sent_p = false;
  at::Tensor& packed = pack(q_wire_);
  if (q_wire_.rounds()) at::_foreach_copy_(q_local_, q_sent_);
  return packed;
}

// A parameter that has come from another bucket, or was loaded, may be due for the other factor.
// All then send P, which needs nothing but Q.
void AlternatingCompressor::settle_if_mixed() {
  const auto sent_p = [](const ParameterStatePtr& state) { return state->sent_p; };
  sends_q_ = std::all_of(states_.begin(), states_.end(), sent_p);
  if (sends_q_) return;
  for (const ParameterStatePtr& state : states_) {
    if (!state->sent_p) continue;
    set_residual(*state, residual(*state));
    state->sent_p = false;
    state->q_local.zero_();
  }
}

void AlternatingCompressor::orthogonalize() {
  if (sends_q_) {
    q_wire_.unpack();
    transposed_.step = bucket_.step;
    stages_.orthogonalize(transposed_);
  } else {
    p_wire_.unpack();
    stages_.orthogonalize(bucket_);
  }
}

void AlternatingCompressor::reconstruct_gradient() {
  if (sends_q_) {
    stages_.reconstruct(seen(kReconstructQ));
  } else {
    at::_foreach_copy_(fixed_q_parts_, q_warm_);
    stages_.reconstruct(seen(kReconstructP));
  }
}

int64_t AlternatingCompressor::payload_bytes() const {
  const int64_t q_numel = plan_.q_numel + plan_.p_numel - plan_.raw_offset();
  return (sends_q_ ? q_numel : plan_.p_numel) * static_cast<int64_t>(c10::elementSize(wire_type()));
}

}  // namespace powersgd
