// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "kernels/cuda/reduce.cuh"
#include "kernels/shared/numerics.h"

// Cholesky factors of Gram matrices, in double.

namespace powersgd::kernels::cuda {

// The pivots below which a column is dead, or weak. The first pass compares with the trace
// (threshold), later ones with the column's own square (own_threshold).
struct PivotLimits {
  double threshold, own_threshold, weak;
};

__device__ __forceinline__ PivotLimits pivot_limits(const Bucket& bucket, int pass, double trace) {
  if (pass == 0) return {dead_share(bucket.epsilon) * trace, 0, kWeakPivot};
  return {0, kDeadPivot, kWeakPivot};
}

// The Cholesky factor L of a Gram matrix, whose lower triangle lies row by row in `gram`. One warp
// calls it, a lane per row, because block barriers would take longer than everything else. factor[j
// * R + i] becomes L[i][j], j < i, and reciprocal[j] 1 / L[j][j], or 0 if column j is dead; it then
// takes no further part. `weak` becomes 1 if a live pivot is weak, else 0. It and all arrays lie in
// shared memory. `column` has room for two columns, without the elements that are done, so that
// they are loaded in pairs.
template <int R>
__device__ __forceinline__ void factorize(const Bucket& bucket, const double* gram, int rank,
                                          int pass, double* column, double* factor,
                                          double* reciprocal, int32_t* weak) {
  const int lane = lane_id();
  const double* const row = gram + lane * (lane + 1) / 2;
  // The row's elements from column j on, so that the loop below need not be unrolled.
  double a[R];
  POWERSGD_UNROLL
  for (int k = 0; k < R; ++k) a[k] = k <= lane && lane < rank ? row[k] : 0;
  const double square = lane < rank ? row[lane] : 0;
  const PivotLimits limits = pivot_limits(bucket, pass, warp_sum(square));
  bool found = false;
  POWERSGD_NO_UNROLL
  for (int j = 0; j < rank; ++j) {
    const double pivot = __shfl_sync(kAllLanes, a[0], j);
    const double own = __shfl_sync(kAllLanes, square, j);
    const bool dead = !(pivot > limits.threshold && pivot > limits.own_threshold * own);
    const double inverse_root = rsqrt(pivot);  // before it is known whether it is needed
    const double scale = dead ? 0 : inverse_root;
    const double below = a[0] * scale;
    double* const next = column + j % 2 * kWarpSize;
    if (lane > j) next[lane - j - 1] = below;
    if (lane > j && lane < R) factor[j * R + lane] = below;
    if (lane == 0) reciprocal[j] = scale;
    found = found || (!dead && pivot < limits.weak * own);
    __syncwarp();
    // What lies beyond the column has no effect on what is used.
    POWERSGD_UNROLL
    for (int k = 1; k < R; ++k) a[k - 1] = a[k] - below * next[k - 1];
  }
  if (lane == 0) *weak = found ? 1 : 0;
}

}  // namespace powersgd::kernels::cuda
