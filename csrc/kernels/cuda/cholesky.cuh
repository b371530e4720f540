// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "kernels/cuda/reduce.cuh"
#include "kernels/shared/numerics.h"

// Cholesky factors of Gram matrices, in double.

namespace powersgd::kernels::cuda {

// The pivots that a Cholesky factorization found.
struct Pivots {
  int32_t dead;  // 1: a column depends on those before it
  int32_t weak;  // 1: a pivot has lost too many of its digits
};

// The pivots below which a column is dead, or weak. The first pass compares with the trace
// (threshold), later ones with the column's own square (own_threshold).
struct PivotLimits {
  double threshold, own_threshold, weak;
};

template <typename F>
__device__ __forceinline__ PivotLimits pivot_limits(const Bucket& bucket, int pass, double trace) {
  if (pass == 0) return {dead_share(bucket.epsilon) * trace, 0, kWeakPivot<F>};
  return {0, kDeadPivot, kWeakPivot<F>};
}

// The Cholesky factor L of a Gram matrix, whose lower triangle lies row by row in `gram`. One warp
// calls it, a lane per row, because block barriers would take longer than everything else. factor[j
// * R + i] becomes L[i][j], j < i, and reciprocal[j] 1 / L[j][j], or 0 if column j is dead; it then
// takes no further part. All arrays and `pivots` lie in shared memory. `column` has room for two
// columns, without the elements that are done, so that they are loaded in pairs.
template <int R, typename F>
__device__ __forceinline__ void factorize(const Bucket& bucket, const double* gram, int rank,
                                          int pass, double* column, double* factor,
                                          double* reciprocal, Pivots* pivots) {
  const int lane = lane_id();
  const double* const row = gram + lane * (lane + 1) / 2;
  // The row's elements from column j on, so that the loop below need not be unrolled.
  double a[R];
  POWERSGD_UNROLL
  for (int k = 0; k < R; ++k) a[k] = k <= lane && lane < rank ? row[k] : 0;
  const double square = lane < rank ? row[lane] : 0;
  const PivotLimits limits = pivot_limits<F>(bucket, pass, warp_sum(square));
  Pivots found{0, 0};
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
    if (dead) found.dead = 1;
    if (pivot < limits.weak * own) found.weak = 1;
    __syncwarp();
    // What lies beyond the column has no effect on what is used.
    POWERSGD_UNROLL
    for (int k = 1; k < R; ++k) a[k - 1] = a[k] - below * next[k - 1];
  }
  if (lane == 0) *pivots = found;
}

}  // namespace powersgd::kernels::cuda
