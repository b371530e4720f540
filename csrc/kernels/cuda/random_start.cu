// SPDX-License-Identifier: BSD-3-Clause
//
// random_start: q_warm[k, column] = random_element(seed, random_id, step, start, k, column).
#include "kernels/cuda/elements.cuh"
#include "kernels/shared/philox.h"
#include "kernels/shared/steps.h"

namespace powersgd::kernels::cuda {
namespace {

// A tile is a strip of columns, over all rows of q_warm.
__global__ void __launch_bounds__(kThreads) random_start_kernel(Bucket bucket, int64_t first_tile) {
  const Tile tile = bucket.tiles[first_tile + blockIdx.x];
  const Matrix matrix = bucket.matrices[tile.item];
  float* const q_warm = static_cast<float*>(matrix.q_warm);
  for (int64_t i = threadIdx.x; i < matrix.rank * kStrip; i += kThreads) {
    const int64_t k = i / kStrip;
    const int64_t col = tile.col_begin + i % kStrip;
    if (col < tile.col_end)
      q_warm[k * matrix.cols + col] =
          random_element(bucket.seed, matrix.random_id, begun_step(bucket), RandomUse::kStart,
                         static_cast<uint32_t>(k), static_cast<uint64_t>(col));
  }
}

}  // namespace

Status random_start(const Bucket& bucket, Stream stream) {
  const int64_t first = bucket.tile_list_begin[kStrips];
  const int64_t count = bucket.tile_list_begin[kStrips + 1] - first;
  return launch<random_start_kernel>(count, 0, stream, Predecessor::kAnything, bucket, first);
}

}  // namespace powersgd::kernels::cuda
