// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "kernels/cuda/elements.cuh"

// The end of a strip in back_project. The sums of the lanes become rows of q, in q_local and the Q
// payload, or partial results of them.

namespace powersgd::kernels::cuda {

template <int R>
constexpr int kRanksAtOnce = R < 8 ? R : 8;  // of reduce_warps

// Elements of shared memory that reduce_warps takes.
template <int R>
constexpr int kReduceElements = kWarps * kRanksAtOnce<R> * kStrip;

// Adds the warps' sums in shared memory, in the order of the warps. Calls write(k, column of the
// strip, sum) once for each sum.
template <int R, int W, typename F, typename Write>
__device__ __forceinline__ void reduce_warps(const F (&sums)[R][W], F* shared, const Write& write) {
  constexpr int kRanks = kRanksAtOnce<R>;
  constexpr int kWidth = kWarpSize * W;  // shared is [kWarps][kRanks][kWidth]
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  POWERSGD_UNROLL
  for (int first = 0; first < R; first += kRanks) {
    __syncthreads();
    POWERSGD_UNROLL
    for (int k = 0; k < kRanks; ++k)
      store_columns<Access::kReuse>(shared + (warp * kRanks + k) * kWidth + lane * W,
                                    DType::kFloat32, sums[first + k]);
    __syncthreads();
    for (int i = threadIdx.x; i < kRanks * kWidth; i += kThreads) {
      F sum = 0;
      POWERSGD_UNROLL
      for (int w = 0; w < kWarps; ++w) sum += shared[w * kRanks * kWidth + i];
      write(first + i / kWidth, i % kWidth, sum);
    }
  }
}

// Writes rows [k0, k0 + R) of q at columns [begin, begin + 32 W) of a tile. All threads of the
// block call it.
template <int R, int W, typename F>
__device__ __forceinline__ void write_q(const Bucket& bucket, const Matrix& matrix,
                                        const Tile& tile, int64_t begin, int64_t k0,
                                        const F (&sums)[R][W], F* shared) {
  const bool whole = tile.row_end - tile.row_begin == matrix.rows;
  F* const q_local = global(static_cast<F*>(matrix.q_local));
  F* const payload = elements<F>(bucket.q_payload, matrix.q_offset);
  F* const partial = slot_pointer<F>(bucket, tile.slot) + (begin - tile.col_begin);
  reduce_warps<R>(sums, shared, [&](int k, int column, F sum) {
    const int64_t col = begin + column;
    if (k0 + k >= matrix.rank || col >= tile.col_end) return;
    if (!whole) {
      partial[(k0 + k) * kStrip + column] = sum;
      return;
    }
    payload[(k0 + k) * matrix.cols + col] = sum;
    q_local[(k0 + k) * matrix.cols + col] = sum;
  });
}

// Adds the partial q of a strip's row ranges, for every ranks-th row of q from `first`. Two groups
// of threads take every other range. Shared memory is [kStrip].
template <typename F>
__device__ __forceinline__ void sum_row_ranges(const Bucket& bucket, const Matrix& matrix,
                                               const Tile& tile, int first, int ranks) {
  static_assert(kThreads == 2 * kStrip, "there are two groups");
  const int column = threadIdx.x % kStrip;
  const int group = threadIdx.x / kStrip;
  const int64_t stride = slots(matrix.rank * kStrip * sizeof(F)) * (kSlotBytes / sizeof(F));
  F* const shared = reinterpret_cast<F*>(shared_memory());
  for (int64_t k = first; k < matrix.rank; k += ranks) {
    const F* const partial = global(slot_pointer<F>(bucket, tile.slot)) + k * kStrip + column;
    F sum = 0;
    POWERSGD_UNROLL_8
    for (int part = group; part < tile.parts; part += kThreads / kStrip)
      sum += partial[part * stride];
    if (group == 1) shared[column] = sum;
    __syncthreads();
    const int64_t col = tile.col_begin + column;
    if (group == 0 && col < tile.col_end) {
      sum += shared[column];
      elements<F>(bucket.q_payload, matrix.q_offset)[k * matrix.cols + col] = sum;
      static_cast<F*>(matrix.q_local)[k * matrix.cols + col] = sum;
    }
    __syncthreads();
  }
}

}  // namespace powersgd::kernels::cuda
