// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>

#include "kernels/shared/host_device.h"

// The constants of orthogonalize. Both devices use them, so both find the same columns dead.
//
// A pivot is what remains of a column's square once the columns before it are subtracted.

namespace powersgd::kernels {

// "Twice is enough" (Parlett, citing Kahan). The third pass is for columns of which the first one
// leaves few digits.
constexpr int kMaxPasses = 3;

// A column is dead if its pivot is at or below this share of the trace, which is the rounding noise
// of float. Later passes compare with the column's own square.
constexpr double kDeadPivot = 1.0 / (int64_t{1} << 46);

// A pivot below this share of its column's square is weak: another pass follows. One pass leaves
// columns orthonormal to the roundoff of double, 1e-16, over the weakest share, and columns in
// float need no more than 1e-8.
constexpr double kWeakPivot = 1e-8;

// The share of the trace at or below which a pivot is dead in the first pass.
POWERSGD_HOST_DEVICE inline double dead_share(double epsilon) {
  return epsilon > kDeadPivot ? epsilon : kDeadPivot;
}

}  // namespace powersgd::kernels
