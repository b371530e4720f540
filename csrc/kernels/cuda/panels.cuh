// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cuda_pipeline_primitives.h>

#include "kernels/cuda/elements.cuh"

// Strips of a factor [rank, cols] in shared memory, for all warps of a block. One is copied while
// another is used.

namespace powersgd::kernels::cuda {

// A panel holds R rows of 32 W columns. Rows and columns beyond the factor's are 0.
template <int R, int W, typename F>
constexpr int kPanelElements = R * kWarpSize * W;

template <int R, int W, typename F>
class Panels {
 public:
  // `shared` has room for two panels.
  __device__ explicit Panels(F* shared) : shared_(shared) {}

  // Begins to copy columns [first, end), of which a panel has room, while current() is used. All
  // threads of the block call it.
  __device__ __forceinline__ void fetch(const F* factor, int64_t cols, int rank, int first,
                                        int end) {
    F* const panel = shared_ + (1 - used_) * kPanelElements<R, W, F>;
    POWERSGD_UNROLL
    for (int i = threadIdx.x; i < R * kWarpSize; i += kThreads) {
      const int k = i / kWarpSize, col = i % kWarpSize * W;
      F* const to = panel + k * kWarpSize * W + col;
      if (k < rank && first + col < end) {
        __pipeline_memcpy_async(to, factor + k * cols + first + col, W * sizeof(F));
      } else {
        POWERSGD_UNROLL
        for (int j = 0; j < W; ++j) to[j] = 0;
      }
    }
    __pipeline_commit();
  }

  // Makes the fetched panel the current one. No thread uses the last one any longer, so that the
  // next may be fetched.
  __device__ __forceinline__ void turn() {
    __pipeline_wait_prior(0);
    __syncthreads();
    used_ = 1 - used_;
  }

  // Row k of the current panel at this lane's columns.
  __device__ __forceinline__ void load(int k, F (&out)[W]) const {
    load_columns<Access::kReuse>(shared_ + used_ * kPanelElements<R, W, F> + k * kWarpSize * W +
                                     threadIdx.x % kWarpSize * W,
                                 DType::kFloat32, out);
  }

 private:
  F* const shared_;
  int used_ = 0;
};

}  // namespace powersgd::kernels::cuda
