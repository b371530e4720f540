// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "kernels/cuda/dispatch.cuh"
#include "kernels/cuda/grid.cuh"
#include "kernels/cuda/payload.cuh"

// What a block of reconstruct has in shared memory: rows of p_hat and, above rank 8, a strip of Q.

namespace powersgd::kernels::cuda {

constexpr size_t kTicketBytes = 16;  // of shared memory, in front of all else
static_assert(sizeof(Ticket) <= kTicketBytes);

template <int R>
constexpr bool kIsLowRank = R <= kMostRanksInRegisters;

constexpr int kRowsOfWarp = kRowsOfBlock / kWarps;
// Rows of p_hat in shared memory at a time.
template <int R>
constexpr int kStagedRows = kIsLowRank<R> ? 256 : 4096 / R;

// Shared memory has p_hat as [rows][ranks] and, above rank 8, Q as [ranks][kStrip].
constexpr int kLeastReconstructBytes = 512;
template <int R, typename G>
constexpr size_t kReconstructBytes = std::max<size_t>(
    kLeastReconstructBytes, sizeof(float) * R * (kStagedRows<R> + (kIsLowRank<R> ? 0 : kStrip)));

__device__ __forceinline__ float* staged_p() {
  return reinterpret_cast<float*>(shared_memory() + kTicketBytes);
}

template <int R>
__device__ __forceinline__ float* staged_q() {
  return staged_p() + kStagedRows<R> * R;
}

// The rows of a tile from `begin` on, at most `most` of them.
__device__ __forceinline__ int rows_from(const Tile& tile, int64_t begin, int most) {
  const int64_t left = tile.row_end - begin;
  return left < most ? static_cast<int>(left) : most;
}

// A lane's columns of a strip, from `first` on. Where the gradient is not aligned, the lanes take
// turns, so that neighbors store neighboring elements: the L1 cache joins loads of one sector, but
// not stores.
struct StripColumns {
  int64_t first;
  LaneColumns columns;

  template <typename G>
  __device__ StripColumns(const G* gradient, const Matrix& matrix, const Tile& tile) {
    const bool aligned = is_aligned(gradient, matrix.cols);
    first = tile.col_begin + lane_id() * (aligned ? 4 : 1);
    columns = {aligned, static_cast<int>(tile.col_end - first), aligned ? 1 : kWarpSize};
  }

  // The same columns of another array, with rows of the same length.
  __device__ LaneColumns of(const float* base, const Matrix& matrix) const {
    return {columns.aligned && is_aligned(base, matrix.cols), columns.count, columns.stride};
  }
};

// The factor of p_hat in the output.
__device__ __forceinline__ float scale_of_p(const Bucket& bucket, const Matrix& matrix) {
  return out_of_use(bucket, matrix) ? 0.0f : static_cast<float>(bucket.output_scale);
}

}  // namespace powersgd::kernels::cuda
