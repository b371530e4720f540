// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "kernels/shared/host_device.h"
#include "powersgd/kernels.h"

namespace powersgd::kernels {

// The number of the step that random_start and project begin.
POWERSGD_HOST_DEVICE inline uint64_t begun_step(const Bucket& bucket) {
  return bucket.step == kNextStep ? bucket.state->step + 1 : bucket.step;
}

// What project multiplies the residual by.
POWERSGD_HOST_DEVICE inline double residual_scale(const Bucket& bucket, const Matrix&) {
  return bucket.residual_scale;
}

// Counts the bucket's step, unless another bucket did. One thread of the bucket calls it.
POWERSGD_HOST_DEVICE inline void count_step(const Bucket& bucket, StepCount StepCounts::* which) {
  if (bucket.step_counts == nullptr) return;
  StepCount& steps = bucket.step_counts->*which;
  if (steps.last == bucket.state->step + 1) return;
  steps.last = bucket.state->step + 1;
  ++steps.count;
}

}  // namespace powersgd::kernels
