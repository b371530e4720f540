// SPDX-License-Identifier: BSD-3-Clause
#include "compressor/bucket_states.h"

#include <ATen/ATen.h>

namespace powersgd {

void BucketStates::allocate(const BucketSpec& spec) {
  for (size_t i = 0; i < states_.size(); ++i) {
    if (states_[i]->allocated()) continue;
    const PlannedMatrix& matrix = spec.plan.matrices[i];
    states_[i]->allocate(matrix.shape, matrix.rank, spec.options, spec.gradient_type, spec.device);
  }
}

// One factor serves because the parameters of a bucket go through the same steps. A state that was
// loaded, or that joined the bucket, is first converted to the others' units.
double BucketStates::begin_step(const StepInfo& step) {
  const double common = states_.front()->grad_scale;
  for (const ParameterStatePtr& state : states_) {
    state->rescale(common);
    state->grad_scale = step.grad_scale;
    state->last_step = static_cast<int64_t>(step.step);
  }
  return step.drop_residual ? 0 : step.grad_scale / common;
}

void BucketStates::rollback(const BucketPlan& plan) {
  if (!gradient_.defined()) return;
  const at::Tensor flat = gradient_.view({-1});
  for (size_t i = 0; i < states_.size(); ++i) {
    const auto [rows, cols] = plan.matrices[i].shape;
    states_[i]->take_back(flat.narrow(0, plan.matrices[i].gradient_offset, rows * cols));
  }
  end_step();
}

}  // namespace powersgd
