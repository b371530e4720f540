// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "kernels/cuda/grid.cuh"
#include "kernels/cuda/payload.cuh"

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
template <int R, typename Write>
__device__ __forceinline__ void reduce_warps(const float (&sums)[R][4], float* shared,
                                             const Write& write) {
  constexpr int kRanks = kRanksAtOnce<R>;
  // shared is [kWarps][kRanks][kStrip]
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  POWERSGD_UNROLL
  for (int first = 0; first < R; first += kRanks) {
    __syncthreads();
    POWERSGD_UNROLL
    for (int k = 0; k < kRanks; ++k)
      store_stored<Access::kShared>(shared + (warp * kRanks + k) * kStrip + lane * 4,
                                    sums[first + k]);
    __syncthreads();
    for (int i = threadIdx.x; i < kRanks * kStrip; i += kThreads) {
      float sum = 0;
      POWERSGD_UNROLL
      for (int w = 0; w < kWarps; ++w) sum += shared[w * kRanks * kStrip + i];
      write(first + i / kStrip, i % kStrip, sum);
    }
  }
}

__device__ __forceinline__ void write_q(float* payload, const Matrix& matrix, int64_t index,
                                        float value) {
  static_cast<float*>(matrix.q_local)[index] = payload[matrix.q_offset + index] = value;
}

// Returns what writes a sum of a tile: write(row of q, column of the strip, sum). Rows and columns
// that do not exist are left out.
__device__ __forceinline__ auto strip_writer(const Bucket& bucket, const Matrix& matrix,
                                             const Tile& tile) {
  float* const payload = q_payload(bucket);
  const int64_t stride = slots(matrix.rank * kStrip * int64_t{sizeof(float)});
  float* const partial = slot_pointer<float>(bucket, tile.slot + tile.part * stride);
  return [=, &matrix, &tile](int64_t k, int column, float sum) {
    const int64_t col = tile.col_begin + column;
    if (k >= matrix.rank || col >= tile.col_end) return;
    if (tile.parts > 1)
      partial[k * kStrip + column] = sum;
    else
      write_q(payload, matrix, k * matrix.cols + col, sum);
  };
}

// Writes q at the columns of a tile. All threads of the block call it.
template <int R>
__device__ __forceinline__ void write_strip(const Bucket& bucket, const Matrix& matrix,
                                            const Tile& tile, const float (&sums)[R][4],
                                            float* shared) {
  reduce_warps<R>(sums, shared, strip_writer(bucket, matrix, tile));
}

// The last block of a strip adds the partial q of its row ranges, in their order. All threads of
// the block call it.
__device__ __forceinline__ void add_row_ranges(const Bucket& bucket, const Matrix& matrix,
                                               const Tile& tile) {
  if (tile.parts == 1) return;
  if (!is_last_to_arrive(&bucket.counters[tile.counter], static_cast<uint64_t>(tile.parts))) return;
  float* const payload = q_payload(bucket);
  const int64_t stride =
      slots(matrix.rank * kStrip * int64_t{sizeof(float)}) * (kSlotBytes / int64_t{sizeof(float)});
  const float* const partial = global(slot_pointer<float>(bucket, tile.slot));
  for (int64_t i = threadIdx.x; i < matrix.rank * kStrip; i += kThreads) {
    const int64_t col = tile.col_begin + i % kStrip;
    if (col >= tile.col_end) continue;
    float sum = 0;
    POWERSGD_UNROLL_4
    for (int part = 0; part < tile.parts; ++part) sum += partial[part * stride + i];
    write_q(payload, matrix, i / kStrip * matrix.cols + col, sum);
  }
}

}  // namespace powersgd::kernels::cuda
