// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "kernels/cuda/reduce.cuh"
#include "kernels/cuda/work.cuh"

// The end of a tile of project: the sums of the lanes become rows of P, or partial results of them.

namespace powersgd::kernels::cuda {

// The partial P of one column range of a row group: [rows, rank].
__device__ __forceinline__ float* partial_p(const Bucket& bucket, const Work& work, int64_t part) {
  const Tile& tile = work.tile;
  const int64_t bytes = (tile.row_end - tile.row_begin) * work.matrix.rank * int64_t{sizeof(float)};
  return global(slot_pointer<float>(bucket, tile.slot + part * slots(bytes)));
}

// Returns what writes a sum of the tile: write(row of the tile, column of P, sum). Rows and columns
// that do not exist are left out.
__device__ __forceinline__ auto sum_writer(const Bucket& bucket, const Work& work) {
  float* const p = p_payload(bucket);
  float* const partial = partial_p(bucket, work, work.tile.part);
  return [=, &work](int row, int k, float sum) {
    const Tile& tile = work.tile;
    const int64_t rank = work.matrix.rank;
    if (row >= static_cast<int>(tile.row_end - tile.row_begin) || k >= rank) return;
    if (tile.parts > 1)
      partial[row * rank + k] = sum;
    else
      p[work.matrix.p_offset + (tile.row_begin + row) * rank + k] = sum;
  };
}

// Writes the warp's rows of P, which begin at row `first` of the tile. sums[i * R + k] is a lane's
// sum of row i and column k.
template <int R, int kRows>
__device__ __forceinline__ void write_lane_sums(const Bucket& bucket, const Work& work, int first,
                                                float (&sums)[kRows * R]) {
  const auto write = sum_writer(bucket, work);
  reduce_lanes(sums);
  visit_lane_sums(sums, [&](int index, float sum) { write(first + index / R, index % R, sum); });
}

// The last block of a row group adds the column ranges in their order. Returns true to that block.
__device__ __forceinline__ bool add_column_ranges(const Bucket& bucket, const Work& work) {
  const Tile& tile = work.tile;
  if (tile.parts == 1) return true;
  if (!is_last_to_arrive(&bucket.counters[tile.counter], static_cast<uint64_t>(tile.parts)))
    return false;
  const int64_t rank = work.matrix.rank;
  float* const p = p_payload(bucket);
  const float* const partial = partial_p(bucket, work, 0);
  const int64_t stride = partial_p(bucket, work, 1) - partial;
  for (int64_t i = threadIdx.x; i < (tile.row_end - tile.row_begin) * rank; i += kThreads) {
    float sum = 0;
    POWERSGD_UNROLL_4
    for (int64_t part = 0; part < tile.parts; ++part) sum += partial[part * stride + i];
    p[work.matrix.p_offset + tile.row_begin * rank + i] = sum;
  }
  return true;
}

}  // namespace powersgd::kernels::cuda
