// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "compressor/bucket_spec.h"
#include "compressor/bucket_states.h"
#include "compressor/bucket_tables.h"
#include "compressor/stages.h"
#include "compressor/wire_payload.h"
#include "powersgd/compressor.h"

namespace powersgd {

// A step sends one factor, P and Q in turns. Each is M times the other one, which the last step has
// orthonormalized (ACP-SGD: Zhang et al., "Evaluation and Optimization of Gradient Compression for
// Distributed Deep Learning", ICDCS 2023):
//
//   sends P: P = M Q^T, output P Q, E = M - p Q with this rank's own p, then p_hat = orth(P)
//   sends Q: Q = p_hat^T M, output p_hat Q, E = M - p_hat q, then q_warm = orth(Q)
//
// It runs the same stages over tables that point at other factors.
class AlternatingCompressor final : public BucketCompressor {
 public:
  AlternatingCompressor(BucketSpec spec, std::vector<ParameterStatePtr> states,
                        std::shared_ptr<StepCounter> step_counter);

  at::Tensor& project(const at::Tensor& gradient, const StepInfo& step) override;
  void orthogonalize() override;
  at::Tensor& back_project() override;
  void reconstruct() override;
  void rollback() override { states_.rollback(spec_.plan); }

  Factors sends() const override { return sends_q_ ? Factors::kQ : Factors::kP; }
  int64_t payload_bytes() const override;
  int64_t gradient_bytes() const override { return spec_.gradient_bytes(); }
  std::vector<ParameterStatePtr> states() const override { return states_.of_matrices(); }

 private:
  // The factor that reconstruct starts from: the reduced P or the reduced Q.
  enum View : size_t { kReconstructP, kReconstructQ, kViews };

  at::Tensor& project_p(const at::Tensor& gradient);
  at::Tensor& project_q(const at::Tensor& gradient);
  void choose_factor();
  kernels::Bucket bucket_of(View view) const;

  void prepare();
  void make_payloads();
  void make_transposed();
  std::vector<kernels::Matrix> table_of(View view) const;

  const BucketSpec spec_;
  const std::shared_ptr<StepCounter> step_counter_;
  const Stages& stages_;
  BucketStates states_;
  bool sends_q_ = false;
  bool prepared_ = false;  // the first step makes all that follows
  // The P payload and the Q payload are parts of one tensor, with the same end:
  //   [ room | the factor | raw segments | activities | non-finite count ]
  at::Tensor payload_, p_payload_, q_payload_;
  at::Tensor fixed_q_;  // [ q_warm of each matrix ], laid out as the Q payload
  WirePayload p_wire_, q_wire_;
  BucketTables tables_;
  BucketTables transposed_;  // the bucket whose P is Q, for orthogonalize
  std::array<at::Tensor, kViews> view_tables_;
  // By matrix: its parts of the payloads and of fixed_q_, and its state's factors.
  std::vector<at::Tensor> p_sent_, q_sent_, fixed_q_parts_, q_warm_, p_local_, q_local_;
};

}  // namespace powersgd
