// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <vector>

#include "compressor/wire_payload.h"
#include "powersgd/compressor.h"

namespace powersgd {

// A step sends P and then Q.
class PlainCompressor final : public BucketCompressor {
 public:
  using BucketCompressor::BucketCompressor;

  void orthogonalize() override;
  at::Tensor& back_project() override;
  int64_t payload_bytes() const override;

 private:
  void prepare() override;
  at::Tensor& project_gradient(const at::Tensor& gradient, const StepInfo& step) override;
  void reconstruct_gradient() override;

  std::vector<at::Tensor> tables_;  // keeps what bucket_ points at
  WirePayload p_wire_, q_wire_;
  std::vector<at::Tensor> q_sent_, q_local_;  // parts of the Q payload, and the states' q_local
};

}  // namespace powersgd
