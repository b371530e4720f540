// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

#include "compressor/bucket_spec.h"
#include "powersgd/compressor.h"
#include "powersgd/parameter_state.h"

namespace powersgd {

// The states of a bucket's matrices, which go through each step together.
class BucketStates {
 public:
  // `states[i]` belongs to `plan.matrices[i]`.
  explicit BucketStates(std::vector<ParameterStatePtr> states) : states_(std::move(states)) {}

  // Allocates the states that are not allocated yet. Converts those of another dtype or device.
  void allocate(const BucketSpec& spec);

  // Notes the step in all states.
  void begin_step(const StepInfo& step);
  // Notes that project has added `gradient`, so that rollback can take it back.
  void projected(const at::Tensor& gradient) { gradient_ = gradient; }
  void end_step() { gradient_ = at::Tensor(); }
  // Takes the gradient back if the step in progress has added it.
  void rollback(const BucketPlan& plan);

  const std::vector<ParameterStatePtr>& of_matrices() const { return states_; }

 private:
  std::vector<ParameterStatePtr> states_;
  at::Tensor gradient_;  // defined from project to the end of the step
};

}  // namespace powersgd
