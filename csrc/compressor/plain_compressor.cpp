// SPDX-License-Identifier: BSD-3-Clause
#include "compressor/plain_compressor.h"

#include <ATen/ATen.h>

#include "compressor/bucket_tables.h"
#include "compressor/stages.h"

namespace powersgd {

void PlainCompressor::prepare() {
  at::Tensor p_payload = at::zeros({plan_.p_numel}, factor_options());
  at::Tensor q_payload = at::zeros({plan_.q_numel}, factor_options());
  bucket_.p_payload = p_payload.data_ptr();
  bucket_.q_payload = q_payload.data_ptr();
  tables_ = set_tables(bucket_, stages_, matrix_table(), raw_table(), device_);
  p_wire_ = WirePayload(p_payload, wire_type(), plan_.counts_offset());
  q_wire_ = WirePayload(q_payload, wire_type(), plan_.q_numel);
  if (!p_wire_.rounds()) return;
  keep_rounding_of(
      p_payload.narrow(0, plan_.raw_offset(), plan_.counts_offset() - plan_.raw_offset()));
  for (size_t i = 0; i < states_.size(); ++i) {
    const at::Tensor& q = states_[i]->q_local;
    q_local_.push_back(q);
    q_sent_.push_back(q_payload.narrow(0, plan_.matrices[i].q_offset, q.numel()).view(q.sizes()));
  }
}

at::Tensor& PlainCompressor::project_gradient(const at::Tensor& gradient, const StepInfo& step) {
  if (!options_.warm_start) {
    kernels::Bucket start = bucket_;
    if (step.same_start) start.step = 0;
    stages_.random_start(start);
  }
  stages_.project(bucket_);
  begin_step(gradient);
  return pack(p_wire_);
}

void PlainCompressor::orthogonalize() {
  p_wire_.unpack();
  stages_.orthogonalize(bucket_);
}

at::Tensor& PlainCompressor::back_project() {
  stages_.back_project(bucket_);
  at::Tensor& packed = q_wire_.pack();
  // What was rounded off was not sent: it stays in the residual, which is made of q_local.
  if (q_wire_.rounds()) at::_foreach_copy_(q_local_, q_sent_);
  return packed;
}

void PlainCompressor::reconstruct_gradient() {
  q_wire_.unpack();
  stages_.reconstruct(bucket_);
}

int64_t PlainCompressor::payload_bytes() const {
  return (plan_.p_numel + plan_.q_numel) * static_cast<int64_t>(c10::elementSize(wire_type()));
}

}  // namespace powersgd
