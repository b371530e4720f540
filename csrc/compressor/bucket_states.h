// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

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

  // Allocates the states that no earlier bucket has.
  void allocate(const BucketSpec& spec);

  // Takes all states to the units of this step's gradient, up to a factor that they have in common
  // and that project applies to the residual: it is returned, 0 to drop the residual.
  double begin_step(const StepInfo& step);
  // Called once project has added `gradient` to the states' memory.
  void projected(const at::Tensor& gradient) { gradient_ = gradient; }
  void end_step() { gradient_ = at::Tensor(); }
  // Takes the gradient back, if the step has added it.
  void rollback(const BucketPlan& plan);

  const std::vector<ParameterStatePtr>& of_matrices() const { return states_; }

 private:
  std::vector<ParameterStatePtr> states_;
  at::Tensor gradient_;  // defined from project to the end of the step
};

}  // namespace powersgd
