// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <memory>
#include <vector>

#include "compressor/bucket_spec.h"
#include "compressor/bucket_states.h"
#include "compressor/bucket_tables.h"
#include "compressor/stages.h"
#include "compressor/wire_payload.h"
#include "powersgd/compressor.h"

namespace powersgd {

// A step sends P and then Q.
class PlainCompressor final : public BucketCompressor {
 public:
  PlainCompressor(BucketSpec spec, std::vector<ParameterStatePtr> states,
                  std::shared_ptr<StepCounter> step_counter);

  at::Tensor& project(const at::Tensor& gradient, const StepInfo& step) override;
  void orthogonalize() override;
  at::Tensor& back_project() override;
  void reconstruct() override;
  void rollback() override { states_.rollback(spec_.plan); }

  Factors sends() const override { return Factors::kPAndQ; }
  int64_t payload_bytes() const override;
  int64_t gradient_bytes() const override { return spec_.gradient_bytes(); }
  std::vector<ParameterStatePtr> states() const override { return states_.of_matrices(); }

 private:
  void prepare();

  const BucketSpec spec_;
  const std::shared_ptr<StepCounter> step_counter_;
  const Stages& stages_;
  BucketStates states_;
  bool prepared_ = false;  // the first step makes all that follows
  WirePayload p_wire_, q_wire_;
  BucketTables tables_;
  std::vector<at::Tensor> q_sent_, q_local_;  // by matrix: its part of the Q payload, and q_local
};

}  // namespace powersgd
