// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "kernels/cuda/columns.cuh"
#include "kernels/cuda/gram.cuh"
#include "kernels/cuda/grid.cuh"

// One pass of orthogonalize over a tile of rows, at ranks up to kMaxFastRank. The phases are those
// of orthogonalize.cu.

namespace powersgd::kernels::cuda {

struct alignas(16) Shared {
  Ticket ticket;
  Pivots pivots;
  int32_t order[kMaxFastRank], next_order[kMaxFastRank];
};
constexpr size_t kSharedBytes = sizeof(Shared) + kGramSharedBytes;
static_assert(sizeof(double) * (kThreads + kMaxFastRank * (kMaxFastRank + 2)) <= kGramSharedBytes,
              "shared memory holds the factor");

__device__ __forceinline__ Shared* shared() { return reinterpret_cast<Shared*>(shared_memory()); }
__device__ __forceinline__ double* scratch() { return reinterpret_cast<double*>(shared() + 1); }

// The partial Gram matrix of a tile, a lower triangle. Even and odd passes have arrays of their
// own, because a block may be a pass ahead of another.
__device__ __forceinline__ double* partial_gram(const Bucket& bucket, const Matrix& matrix,
                                                const Tile& tile, int64_t part, int pass) {
  return slot_pointer<double>(bucket, tile.slot + pass_plan_slots() +
                                          (pass % 2 * tile.parts + part) * gram_slots(matrix.rank));
}

__device__ __forceinline__ PassPlan& pass_plan(const Bucket& bucket, const Tile& tile, int pass) {
  return slot_pointer<PassPlan>(bucket, tile.slot)[pass];
}

// Phase 1 and 3. Returns true if an element is not finite: it has a square that is not.
template <typename X>
__device__ bool gram_of_tile(const Bucket& bucket, const Matrix& matrix, const Tile& tile,
                             const X& x, const int32_t* order, int pass) {
  double* const partial = partial_gram(bucket, matrix, tile, tile.part, pass);
  bool bad = false;
  gram(x, tile.row_begin, tile.row_end, matrix.rank, order, scratch(),
       [&](int64_t i, int64_t j, double value) {
         partial[triangle(i) + j] = value;
         bad = bad || !is_finite(value);
       });
  return bad;
}

// Phase 2. gram is [rank, rank] in shared memory, behind the first kThreads doubles. Returns the
// trace. If there are more threads than elements, several share the tiles, as in gram_blocks.
__device__ inline double sum_gram(const Bucket& bucket, const Matrix& matrix, const Tile& tile,
                                  int pass, double* gram) {
  const int rank = static_cast<int>(matrix.rank);
  const int64_t stride = gram_slots(matrix.rank) * (kSlotBytes / int64_t{sizeof(double)});
  const double* const partial = partial_gram(bucket, matrix, tile, 0, pass);
  const int elements = static_cast<int>(triangle(rank));
  const int at_once = elements < kThreads ? elements : kThreads;
  const int groups = kThreads / at_once < tile.parts ? kThreads / at_once : tile.parts;
  const int group = threadIdx.x / at_once;
  for (int first = 0; first < elements; first += at_once) {
    const int element = first + threadIdx.x % at_once;
    const bool active = group < groups && element < elements;
    double sum[1][1] = {};
    if (active) {
      POWERSGD_UNROLL_4
      for (int64_t t = group; t < tile.parts; t += groups)
        sum[0][0] += partial[t * stride + element];
    }
    add_groups(sum, active, groups, at_once, scratch());
    if (!active || group > 0) continue;
    int64_t row, column;
    locate_in_triangle(element, &row, &column);
    gram[row * rank + column] = sum[0][0];
  }
  __syncthreads();
  double trace = 0;
  for (int i = 0; i < rank; ++i) trace += gram[i * (rank + 1)];
  return trace;
}

// x L^T = p for one row, in place. The element of a dead column becomes 0.
template <int R>
__device__ __forceinline__ void solve_row(const double* factor, const double* reciprocal, int rank,
                                          double (&x)[R]) {
  POWERSGD_UNROLL
  for (int j = 0; j < R; ++j) {
    if (j >= rank) continue;
    POWERSGD_UNROLL
    for (int i = 0; i < j; ++i) x[j] -= factor[j * rank + i] * x[i];
    x[j] *= reciprocal[j];
  }
}

template <int R, typename F, typename X>
__device__ void solve_rows(const Bucket& bucket, const Matrix& matrix, const Tile& tile, const X& p,
                           const double* factor, const double* reciprocal, int pass) {
  const int rank = static_cast<int>(matrix.rank);
  const TallFactor<F> p_hat = p_hat_of<F>(matrix);
  const int32_t* const order = shared()->order;
  for (int64_t row = tile.row_begin + threadIdx.x; row < tile.row_end; row += kThreads) {
    double x[R] = {};
    POWERSGD_UNROLL
    for (int j = 0; j < R; ++j) {
      if (j < rank) x[j] = static_cast<double>(p(row, order[j]));
    }
    solve_row<R>(factor, reciprocal, rank, x);
    POWERSGD_UNROLL
    for (int j = 0; j < R; ++j) {
      if (j >= rank) continue;
      const int32_t column = order[j];
      p_hat.at(row, column) = reciprocal[j] == 0 ? replacement<F>(bucket, matrix, pass, column, row)
                                                 : static_cast<F>(x[j]);
    }
  }
}

// Phases 2 to 4 for one tile. Returns true if another pass is needed.
template <int R, typename F, typename X>
__device__ bool orthogonalize_tile(const Bucket& bucket, const Matrix& matrix, const Tile& tile,
                                   const X& p, int pass) {
  const int64_t rank = matrix.rank;
  double* const factor = scratch() + kThreads;
  double* const reciprocal = factor + rank * rank;
  if (threadIdx.x < rank)
    shared()->order[threadIdx.x] = pass == 0 ? static_cast<int32_t>(threadIdx.x)
                                             : pass_plan(bucket, tile, pass).order[threadIdx.x];
  const double trace = sum_gram(bucket, matrix, tile, pass, factor);
  cholesky(factor, reciprocal, reciprocal + rank, rank, pivot_limits<F>(bucket, pass, trace),
           &shared()->pivots);
  solve_rows<R, F>(bucket, matrix, tile, p, factor, reciprocal, pass);
  const bool again =
      (shared()->pivots.dead != 0 || shared()->pivots.weak != 0) && pass + 1 < kMaxPasses;
  if (!again) return false;
  if (threadIdx.x == 0) live_first(reciprocal, shared()->order, rank, shared()->next_order);
  __syncthreads();
  const TallFactor<F> p_hat = p_hat_of<F>(matrix);
  gram_of_tile(
      bucket, matrix, tile, [&](int64_t row, int64_t column) { return p_hat.at(row, column); },
      shared()->next_order, pass + 1);
  return true;
}

}  // namespace powersgd::kernels::cuda
