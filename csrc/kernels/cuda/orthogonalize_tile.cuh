// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "kernels/cuda/cholesky.cuh"
#include "kernels/cuda/gram.cuh"
#include "kernels/cuda/grid.cuh"
#include "kernels/cuda/payload.cuh"
#include "kernels/cuda/staged_rows.cuh"

// One pass of orthogonalize over a tile of rows, at ranks up to kMaxRank. The phases are those
// of orthogonalize.cu.

namespace powersgd::kernels::cuda {

struct alignas(16) Shared {
  Ticket ticket;
  int32_t weak;  // 1: a pivot of the pass has lost too many of its digits
};

// What phase 2 has in shared memory.
template <int R>
struct alignas(16) SolveArrays {
  double factor[R * R], scratch[kThreads];
  double reciprocal[R], gram[R * (R + 1) / 2];
  float rows[kWarps * kStagedElements<R>];
};

template <int R>
constexpr size_t kSharedBytes =
    sizeof(Shared) + std::max(kGramSharedBytes<R>, sizeof(SolveArrays<R>));
static_assert(kSharedBytes<kMaxRank> <= 48 * 1024, "more has to be asked for");

__device__ __forceinline__ Shared* shared() { return reinterpret_cast<Shared*>(shared_memory()); }
template <int R>
__device__ __forceinline__ SolveArrays<R>& solve_arrays() {
  return *reinterpret_cast<SolveArrays<R>*>(shared() + 1);
}

// The partial Gram matrix of a tile, a lower triangle. Even and odd passes have arrays of their
// own, because a block may be a pass ahead of another.
__device__ __forceinline__ double* partial_gram(const Bucket& bucket, const Matrix& matrix,
                                                const Tile& tile, int64_t part, int pass) {
  return slot_pointer<double>(bucket,
                              tile.slot + (pass % 2 * tile.parts + part) * gram_slots(matrix.rank));
}

// Phase 1 and 3. Returns true if an element is not finite: it has a square that is not.
template <int R>
__device__ bool gram_of_tile(const Bucket& bucket, const Matrix& matrix, const Tile& tile,
                             const TallFactor& x, int pass) {
  double* const partial = partial_gram(bucket, matrix, tile, tile.part, pass);
  bool bad = false;
  gram<R>(x, tile.row_begin, tile.row_end, matrix.rank, reinterpret_cast<double*>(shared() + 1),
          [&](int row, int column, double value) {
            partial[row * (row + 1) / 2 + column] = value;
            bad = bad || !is_finite(value);
          });
  return bad;
}

// How a block adds the tiles' Gram matrices at ranks up to R. As there are more threads than
// elements at low ranks, groups of threads share the tiles.
template <int R>
struct SumShape {
  static constexpr int kElements = R * (R + 1) / 2;
  static constexpr int kAtOnce = kElements > 64 ? kThreads : kElements > 16 ? 64 : 16;
  static constexpr int kPerThread = (kElements + kAtOnce - 1) / kAtOnce;
  static constexpr int kGroups = kThreads / kAtOnce;
  // Loads of a thread that are under way at a time.
  static constexpr int kBatch = kPerThread > 1 ? 8 : kGroups > 4 ? kMaxTilesToFactor / kGroups : 16;
};

// Phase 2.
template <int R>
__device__ __forceinline__ void sum_gram(const Bucket& bucket, const Matrix& matrix,
                                         const Tile& tile, int pass, double* sums, double* gram) {
  constexpr int kAtOnce = SumShape<R>::kAtOnce, kGroups = SumShape<R>::kGroups;
  constexpr int kPerThread = SumShape<R>::kPerThread, kBatch = SumShape<R>::kBatch;
  const int elements = static_cast<int>(triangle(matrix.rank));
  const int group = static_cast<int>(threadIdx.x) / kAtOnce;
  const int element = static_cast<int>(threadIdx.x) % kAtOnce;
  const double* const partial = partial_gram(bucket, matrix, tile, 0, pass) + element;
  const int stride =
      static_cast<int>(gram_slots(matrix.rank)) * static_cast<int>(kSlotBytes / sizeof(double));
  double sum[kPerThread] = {};
  POWERSGD_NO_UNROLL
  for (int first = group; first < tile.parts; first += kBatch * kGroups) {
    double value[kBatch][kPerThread];
    POWERSGD_UNROLL
    for (int k = 0; k < kBatch; ++k) {
      const int part = first + k * kGroups;
      POWERSGD_UNROLL
      for (int i = 0; i < kPerThread; ++i)
        value[k][i] = part < tile.parts && element + i * kAtOnce < elements
                          ? partial[part * stride + i * kAtOnce]
                          : 0;
    }
    POWERSGD_UNROLL
    for (int k = 0; k < kBatch; ++k) {
      POWERSGD_UNROLL
      for (int i = 0; i < kPerThread; ++i) sum[i] += value[k][i];
    }
  }
  if constexpr (kGroups > 1) {
    sums[threadIdx.x] = sum[0];
    __syncthreads();
    if (group > 0) return;
    POWERSGD_UNROLL
    for (int i = 1; i < kGroups; ++i) sum[0] += sums[i * kAtOnce + element];
  }
  POWERSGD_UNROLL
  for (int i = 0; i < kPerThread; ++i) {
    if (element + i * kAtOnce < elements) gram[element + i * kAtOnce] = sum[i];
  }
}

// x L^T = p for one row, in place. The element of a dead column becomes 0. What a column adds to
// those after it does not depend on what it adds to others, so no long chain of sums forms.
template <int R>
__device__ __forceinline__ void solve_row(const double* factor, const double* reciprocal, int rank,
                                          double (&x)[R]) {
  POWERSGD_UNROLL
  for (int j = 0; j < R; ++j) {
    if (j >= rank) continue;
    x[j] *= reciprocal[j];
    POWERSGD_UNROLL
    for (int i = j + 1; i < R; ++i) x[i] -= factor[j * R + i] * x[j];
  }
}

template <int R>
__device__ __forceinline__ void solve_own_row(int rank, const StagedRows<R>& rows) {
  const SolveArrays<R>& arrays = solve_arrays<R>();
  double x[R] = {};
  POWERSGD_UNROLL
  for (int j = 0; j < R; ++j) {
    if (j < rank) x[j] = static_cast<double>(rows.own(j));
  }
  solve_row<R>(arrays.factor, arrays.reciprocal, rank, x);
  POWERSGD_UNROLL
  for (int j = 0; j < R; ++j) {
    if (j < rank) rows.own(j) = static_cast<float>(x[j]);
  }
}

// `rows` has the warp's first rows of the tile; in the first pass they are in shared memory.
template <int R>
__device__ __forceinline__ void solve_rows(const Bucket& bucket, const Matrix& matrix,
                                           StagedRows<R>& rows, int pass) {
  const TallFactor p_hat = p_hat_of(matrix);
  const TallFactor x = pass == 0 ? p_of(bucket, matrix) : p_hat;
  if (pass > 0) rows.load(x);
  while (rows.left()) {
    __syncwarp();
    if (rows.has_own()) solve_own_row(static_cast<int>(matrix.rank), rows);
    __syncwarp();
    rows.store(p_hat);
    rows.next();
    rows.load(x);  // nothing if no rows are left
  }
}

// Phases 2 to 4 for one tile. Returns true if another pass is needed. See solve_rows on `rows`.
template <int R>
__device__ __forceinline__ bool orthogonalize_tile(const Bucket& bucket, const Matrix& matrix,
                                                   const Tile& tile, StagedRows<R>& rows, int pass,
                                                   bool skip) {
  SolveArrays<R>& arrays = solve_arrays<R>();
  sum_gram<R>(bucket, matrix, tile, pass, arrays.scratch, arrays.gram);
  __syncthreads();
  if (skip) return false;  // not earlier, because this has only just been loaded
  if (warp_id() == 0)
    factorize<R>(bucket, arrays.gram, static_cast<int>(matrix.rank), pass, arrays.scratch,
                 arrays.factor, arrays.reciprocal, &shared()->weak);
  __syncthreads();
  solve_rows(bucket, matrix, rows, pass);
  if (shared()->weak == 0 || pass + 1 == kMaxPasses) return false;
  __syncthreads();
  gram_of_tile<R>(bucket, matrix, tile, p_hat_of(matrix), pass + 1);
  return true;
}

}  // namespace powersgd::kernels::cuda
