// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>

#include "kernels/shared/host_device.h"
#include "kernels/shared/layout.h"
#include "kernels/shared/philox.h"
#include "powersgd/kernels/kernels.h"

// Where the next step starts from if a row of Q is zero: its column of p_hat was dead, or the
// gradient was zero. A new direction finds what the gradient gains later. Only half of the row is
// new, so that one step without a gradient doesn't cost the warm start.

namespace powersgd::kernels {

// A power of two that brings `cols` random elements, whose variance is 1/3, to a norm of about 1.
POWERSGD_HOST_DEVICE inline float unit_row_scale(int64_t cols) {
  float scale = 1;
  for (; cols > 3; cols = ceil_div(cols, 4)) scale /= 2;
  return scale;
}

// An element of q_warm, of which `row` and `col` say the place and `scale` is unit_row_scale. The
// product is exact, so contracting it with the sum changes no bits.
POWERSGD_HOST_DEVICE inline float redrawn(const Bucket& bucket, const Matrix& matrix, int64_t row,
                                          int64_t col, float scale, float old) {
  const float random =
      random_element(bucket.seed, matrix.random_id, bucket.state->step, RandomUse::kZeroRow,
                     static_cast<uint32_t>(row), static_cast<uint64_t>(col));
  return 0.5f * (old + static_cast<float>(scale * random));
}

}  // namespace powersgd::kernels
