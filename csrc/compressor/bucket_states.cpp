// SPDX-License-Identifier: BSD-3-Clause
#include "compressor/bucket_states.h"

#include <ATen/ATen.h>

namespace powersgd {

void BucketStates::allocate(const BucketSpec& spec) {
  std::vector<ParameterState::Layout> missing;
  for (size_t i = 0; i < states_.size(); ++i) {
    if (states_[i]->fits(spec.gradient_type, spec.device)) continue;
    if (states_[i]->allocated()) {
      states_[i]->convert(spec.gradient_type, spec.options, spec.device);
      continue;
    }
    const PlannedMatrix& matrix = spec.plan.matrices[i];
    missing.push_back({states_[i].get(), matrix.shape, matrix.rank, spec.gradient_type});
  }
  ParameterState::allocate(missing, spec.options, spec.device);
}

void BucketStates::begin_step(const StepInfo& step) {
  for (const ParameterStatePtr& state : states_) state->last_step = static_cast<int64_t>(step.step);
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
