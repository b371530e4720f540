// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "kernels/cuda/block_tiles.h"
#include "kernels/cuda/elements.cuh"
#include "kernels/shared/numerics.h"

// Gram matrices and their Cholesky factors, by one block, in double. Both ways of orthogonalize.cu
// are made of them. All threads of the block call every function.

namespace powersgd::kernels::cuda {

// Threads hold square blocks of the Gram matrix, kGramBlock<rank> wide.
constexpr int64_t kGramBlock = 4;
constexpr size_t kGramSharedBytes = sizeof(double) * kThreads * kGramBlock * kGramBlock;

// The row and column of the i-th element of a lower triangle.
__device__ inline void locate_in_triangle(int64_t i, int64_t* row, int64_t* column) {
  *row = static_cast<int64_t>((sqrtf(8.0f * static_cast<float>(i) + 1) - 1) / 2);
  while (triangle(*row + 1) <= i) ++*row;
  while (triangle(*row) > i) --*row;
  *column = i - triangle(*row);
}

// Adds the sums of `groups` groups of threads, `distance` threads apart, pairwise and always in the
// same order, in shared memory of kGramSharedBytes. The first group has the result.
template <int B>
__device__ __forceinline__ void add_groups(double (&sum)[B][B], bool active, int groups,
                                           int distance, double* shared) {
  double* const cell = shared + threadIdx.x * B * B;
  const int group = threadIdx.x / distance;
  for (int count = groups; count > 1;) {
    const int half = (count + 1) / 2;
    __syncthreads();
    if (active && group >= half && group < count) {
      POWERSGD_UNROLL
      for (int i = 0; i < B * B; ++i) cell[i] = sum[i / B][i % B];
    }
    __syncthreads();
    if (active && group + half < count) {
      POWERSGD_UNROLL
      for (int i = 0; i < B * B; ++i) sum[i / B][i % B] += cell[half * distance * B * B + i];
    }
    count = half;
  }
}

// A block of B x B elements of X^T X: products of the columns at left and right, over every
// step-th row. x(row, column) returns an element of X.
template <int B, typename X>
__device__ __forceinline__ void accumulate_block(const X& x, int64_t begin, int64_t end,
                                                 int64_t step, const int64_t (&left)[B],
                                                 const int64_t (&right)[B], double (&sum)[B][B]) {
  POWERSGD_UNROLL_4
  for (int64_t row = begin; row < end; row += step) {
    double a[B], b[B];
    POWERSGD_UNROLL
    for (int i = 0; i < B; ++i) a[i] = x(row, left[i]), b[i] = x(row, right[i]);
    POWERSGD_UNROLL
    for (int i = 0; i < B; ++i) {
      POWERSGD_UNROLL
      for (int j = 0; j < B; ++j) sum[i][j] += a[i] * b[j];
    }
  }
}

// The lower triangle of X^T X over rows [begin, end) of X: element (i, j) to out(i, j, value).
// Column c of the product is column order[c] of X.
//
// The triangle is cut into blocks of B x B, one per thread; threads that are left over form further
// groups, which share the rows with the first.
template <int B, typename X, typename Out>
__device__ __forceinline__ void gram_blocks(const X& x, int64_t begin, int64_t end, int64_t rank,
                                            const int32_t* order, double* shared, const Out& out) {
  const int64_t blocks = triangle(ceil_div(rank, B));
  const int at_once = blocks < kThreads ? static_cast<int>(blocks) : kThreads;
  const int groups = kThreads / at_once;
  const int group = threadIdx.x / at_once;
  for (int64_t first = 0; first < blocks; first += at_once) {
    const int64_t block = first + threadIdx.x % at_once;
    const bool active = group < groups && block < blocks;
    int64_t block_row, block_column;
    locate_in_triangle(block, &block_row, &block_column);
    int64_t left[B], right[B];
    POWERSGD_UNROLL
    for (int i = 0; i < B; ++i) {
      // Columns beyond the rank repeat the last one and are not written.
      left[i] = order[block_row * B + i < rank ? block_row * B + i : rank - 1];
      right[i] = order[block_column * B + i < rank ? block_column * B + i : rank - 1];
    }
    double sum[B][B] = {};
    if (active) accumulate_block(x, begin + group, end, groups, left, right, sum);
    add_groups(sum, active, groups, at_once, shared);
    if (!active || group > 0) continue;
    POWERSGD_UNROLL
    for (int i = 0; i < B * B; ++i) {
      const int64_t row = block_row * B + i / B, column = block_column * B + i % B;
      if (row < rank && column <= row) out(row, column, sum[i / B][i % B]);
    }
  }
  __syncthreads();
}

template <typename X, typename Out>
__device__ void gram(const X& x, int64_t begin, int64_t end, int64_t rank, const int32_t* order,
                     double* shared, const Out& out) {
  if (rank == 1)
    gram_blocks<1>(x, begin, end, rank, order, shared, out);
  else if (rank == 2)
    gram_blocks<2>(x, begin, end, rank, order, shared, out);
  else
    gram_blocks<kGramBlock>(x, begin, end, rank, order, shared, out);
}

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

// Column j of the Cholesky factor, by one warp: square roots and divisions in double are dear where
// a processor has two units for them.
__device__ inline void finish_column(double* a, double* inverse, const double* square, int n, int j,
                                     const PivotLimits& limits, Pivots* pivots) {
  const int lane = static_cast<int>(threadIdx.x);
  const double pivot = a[j * n + j];
  const bool dead = !(pivot > limits.threshold && pivot > limits.own_threshold * square[j]);
  const double scale = dead ? 0 : 1 / sqrt(pivot);
  for (int i = j + 1 + lane; i < n; i += kWarpSize) a[i * n + j] *= scale;
  if (lane != 0) return;
  inverse[j] = scale;
  if (dead) pivots->dead = 1;
  if (pivot < limits.weak * square[j]) pivots->weak = 1;
}

// The Cholesky factor L of a Gram matrix in place: a[i * rank + j], j <= i. inverse[j] becomes
// 1 / L[j][j], or 0 if column j is dead; it then takes no further part. `pivots` lies in shared
// memory.
__device__ inline void cholesky(double* a, double* inverse, double* square, int64_t rank,
                                const PivotLimits& limits, Pivots* pivots) {
  const int n = static_cast<int>(rank);
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  for (int j = threadIdx.x; j < n; j += kThreads) square[j] = a[j * n + j];
  if (threadIdx.x == 0) *pivots = {0, 0};
  __syncthreads();
  for (int j = 0; j < n; ++j) {
    if (warp == 0) finish_column(a, inverse, square, n, j, limits, pivots);
    __syncthreads();
    for (int i = j + 1 + warp; i < n; i += kWarps) {
      for (int k = j + 1 + lane; k <= i; k += kWarpSize)
        a[i * n + k] -= a[i * n + j] * a[k * n + j];
    }
    __syncthreads();
  }
}

}  // namespace powersgd::kernels::cuda
