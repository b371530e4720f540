// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "kernels/cuda/elements.cuh"
#include "kernels/cuda/strips.cuh"

// The part of a tile of back_project besides its products: where M lies, and the steps that send
// zeros.

namespace powersgd::kernels::cuda {

constexpr int kStagedRows = 256;  // of p_hat, in shared memory at a time

// Memory is finite. Without it M is the gradient.
__device__ __forceinline__ void keep_finite(float (&m)[4], bool is_gradient) {
  if (is_gradient) replace_non_finite(m);
}

// Where a tile's M lies: in memory or, without error feedback, in the gradient.
template <typename S>
struct StoredM {
  const S* base;
  DType dtype;
  bool is_gradient;

  __device__ StoredM(const Bucket& bucket, const Matrix& matrix)
      : base(matrix.memory == nullptr
                 ? global(static_cast<const S*>(bucket.gradient) + matrix.gradient_offset)
                 : global(static_cast<const S*>(matrix.memory))),
        dtype(matrix.memory == nullptr ? bucket.gradient_dtype : bucket.residual_dtype),
        is_gradient(matrix.memory == nullptr) {}
};

__device__ __forceinline__ int rows_of_chunk(const Tile& tile, int64_t begin) {
  const int64_t left = tile.row_end - begin;
  return left < kStagedRows ? static_cast<int>(left) : kStagedRows;
}

// True if q is zero, and nothing is to be computed. Waits for orthogonalize.
__device__ __forceinline__ bool sends_zeros(const Bucket& bucket, const Matrix& matrix) {
  wait_for_predecessor();
  return bucket.state->skipped != 0 || out_of_use(bucket, matrix);
}

__device__ inline void send_zeros(const Bucket& bucket, const Matrix& matrix, const Tile& tile) {
  if (tile.part != 0) return;
  float* const payload = q_payload(bucket);
  for (int64_t i = threadIdx.x; i < matrix.rank * kStrip; i += kThreads) {
    const int64_t col = tile.col_begin + i % kStrip;
    if (col < tile.col_end) write_q(payload, matrix, i / kStrip * matrix.cols + col, 0.0f);
  }
}

}  // namespace powersgd::kernels::cuda
