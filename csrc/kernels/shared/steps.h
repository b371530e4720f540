// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "kernels/shared/host_device.h"
#include "powersgd/kernels/kernels.h"

namespace powersgd::kernels {

// The number of the step that random_start and project begin.
POWERSGD_HOST_DEVICE inline uint64_t begun_step(const Bucket& bucket) {
  return bucket.step == kNextStep ? bucket.state->step + 1 : bucket.step;
}

// The units of the step's gradient.
POWERSGD_HOST_DEVICE inline double units_of(const Bucket& bucket) {
  return bucket.loss_scale == nullptr ? bucket.units : bucket.units * double{*bucket.loss_scale};
}

// The factor that converts the matrix's residual to the units of the gradient. A loss scale of 0,
// which a GradScaler reaches by halving too often, leaves no residual, so M stays finite.
POWERSGD_HOST_DEVICE inline double residual_scale(const Bucket& bucket, const Matrix& matrix) {
  return *matrix.memory_units > 0 ? units_of(bucket) / *matrix.memory_units : 0;
}

// Counts the bucket's step as skipped, unless another bucket did. One thread calls it.
POWERSGD_HOST_DEVICE inline void count_skipped_step(const Bucket& bucket) {
  if (bucket.skipped_steps == nullptr) return;
  StepCount& steps = *bucket.skipped_steps;
  if (steps.last == bucket.state->step + 1) return;
  steps.last = bucket.state->step + 1;
  ++steps.count;
}

}  // namespace powersgd::kernels
