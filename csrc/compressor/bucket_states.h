// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <utility>
#include <vector>

#include "compressor/bucket_spec.h"
#include "powersgd/compressor/compressor.h"
#include "powersgd/compressor/parameter_state.h"

namespace powersgd {

// The states of a bucket's matrices, which go through each step together.
//
// project adds a parameter's gradient before this rank knows whether another rank has used the
// parameter. If the gradient is left from an earlier pass, this class copies it and the state, and
// restores both unless some rank has used the parameter.
class BucketStates {
 public:
  // `states[i]` belongs to `plan.matrices[i]`.
  explicit BucketStates(std::vector<ParameterStatePtr> states) : states_(std::move(states)) {}

  // Allocates the states that are not allocated yet. Converts those of another dtype or device.
  void allocate(const BucketSpec& spec);

  // Called before project, with the gradient that it will add.
  void begin_step(const BucketPlan& plan, const at::Tensor& gradient, const StepInfo& step);
  // Notes that project has added `gradient`, so rollback can take it back.
  void projected(const at::Tensor& gradient) { gradient_ = gradient; }
  // Called after reconstruct, with the reduced P payload.
  void end_step(const BucketPlan& plan, const at::Tensor& p_payload);
  // Takes the gradient back if the step in progress has added it.
  void rollback(const BucketPlan& plan);

  const std::vector<ParameterStatePtr>& of_matrices() const { return states_; }
  // What projected() was called with in the step in progress.
  const at::Tensor& gradient() const { return gradient_; }

 private:
  struct Stale {
    size_t matrix;
    at::Tensor gradient, gradient_before;  // the matrix's part of the bucket, and a copy
    std::vector<at::Tensor> state_before;  // ParameterState::step_tensors
  };
  void forget_step();

  std::vector<ParameterStatePtr> states_;
  std::vector<Stale> stale_;
  at::Tensor gradient_;  // defined from project to the end of the step
};

}  // namespace powersgd
