// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cuda_pipeline_primitives.h>

#include "kernels/cuda/elements.cuh"

// Strips of a factor [rank, cols] in shared memory, for all warps of a block. One is copied while
// another is used.

namespace powersgd::kernels::cuda {

// A panel holds R rows of a strip, kStride elements apart. Rows and columns beyond the factor's are
// 0.
template <int R, int kStride = kStrip>
class Panels {
 public:
  static constexpr int kElements = 2 * R * kStride;  // of shared memory

  __device__ explicit Panels(float* shared) : shared_(shared) {}

  // Begins to copy columns [first, end) of a matrix's factor, as far as they have room, to kRows
  // rows of the panel that is not in use. All threads of the block call it.
  template <int kRows = R>
  __device__ __forceinline__ void fetch(const float* factor, const Matrix& matrix, bool aligned,
                                        int64_t first, int64_t end, int to_row = 0) {
    float* const panel = shared_ + ((1 - used_) * R + to_row) * kStride;
    if (aligned)
      copy<kRows, 4>(factor, matrix, first, end, panel);
    else
      copy<kRows, 1>(factor, matrix, first, end, panel);
    __pipeline_commit();
  }

  // Takes the fetched panel into use. No thread uses the previous one any longer, so the next may
  // be fetched.
  __device__ __forceinline__ void turn() {
    __pipeline_wait_prior(0);
    __syncthreads();
    used_ = 1 - used_;
  }

  // A row of the panel in use.
  __device__ __forceinline__ const float* row(int row) const {
    return shared_ + (used_ * R + row) * kStride;
  }

 private:
  // kWidth columns at a time.
  template <int kRows, int kWidth>
  __device__ __forceinline__ static void copy(const float* factor, const Matrix& matrix,
                                              int64_t first, int64_t end, float* panel) {
    constexpr int kPerRow = kStrip / kWidth;
    POWERSGD_NO_UNROLL
    for (int i = threadIdx.x; i < kRows * kPerRow; i += kThreads) {
      const int k = i / kPerRow, col = i % kPerRow * kWidth;
      float* const to = panel + k * kStride + col;
      if (k < matrix.rank && first + col < end) {
        __pipeline_memcpy_async(to, factor + k * matrix.cols + first + col, kWidth * sizeof(float));
      } else {
        POWERSGD_UNROLL
        for (int j = 0; j < kWidth; ++j) to[j] = 0;
      }
    }
  }

  float* const shared_;
  int used_ = 0;
};

}  // namespace powersgd::kernels::cuda
