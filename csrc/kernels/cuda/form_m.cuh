// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "kernels/cuda/elements.cuh"
#include "kernels/cuda/work.cuh"

// M, the sum of the residual and the gradient, at a few rows of a lane's columns. project reads the
// gradient and memory only here.

namespace powersgd::kernels::cuda {

// kRows rows of a matrix, by pointers to the first row at the tile's first column. G and M say how
// the gradient and memory are stored.
template <int kRows, typename G, typename M>
struct Rows {
  const G* gradient;
  M* memory;           // unless M is the gradient
  const float* p_hat;  // the first row; the last step sent the product p_hat q_local
  int cols;
  int count;              // rows that exist, of kRows
  bool gradient_aligned;  // the buffer's owner decides where a gradient lies
  bool aligned;           // memory, q_local and q_warm
  DType gradient_dtype;
  const Work* work;  // in shared memory, for what no register holds

  __device__ int rank() const { return static_cast<int>(work->matrix.rank); }
  __device__ bool has_memory() const { return work->matrix.memory != nullptr; }
  // After share_residual_scale.
  __device__ float scale() const { return work->scale; }

  // A lane's columns from `col` on, of a tile of `width`: all four if aligned.
  __device__ LaneColumns columns(int col, int width) const {
    return {aligned, aligned ? 4 : width - col};
  }

  // A row beyond the last repeats the first, and is not stored.
  __device__ int64_t offset(int row) const { return row < count ? int64_t{row} * cols : 0; }
};

// The rows of a tile from row `first` on. There are none if that is beyond the tile's end.
template <int kRows, typename G, typename M>
__device__ __forceinline__ Rows<kRows, G, M> rows_of(const Bucket& bucket, const Work& work,
                                                     int first) {
  const Tile& tile = work.tile;
  const Matrix& matrix = work.matrix;
  const int left = static_cast<int>(tile.row_end - tile.row_begin) - first;
  const int64_t row = tile.row_begin + (left > 0 ? first : 0);
  const int64_t offset = row * matrix.cols + tile.col_begin;
  const G* const gradient = static_cast<const G*>(bucket.gradient) + matrix.gradient_offset;
  Rows<kRows, G, M> rows;
  rows.count = left < 0 ? 0 : left < kRows ? left : kRows;
  rows.gradient = gradient + offset;
  rows.memory = global(static_cast<M*>(matrix.memory)) + offset;
  rows.work = &work;
  rows.p_hat = global(static_cast<const float*>(matrix.p_hat)) + row * matrix.rank;
  rows.cols = static_cast<int>(matrix.cols);
  // Without branches, as the first loads wait for it.
  rows.gradient_aligned = is_aligned(gradient, matrix.cols);
  rows.aligned = is_aligned(static_cast<const M*>(matrix.memory), matrix.cols) &
                 is_aligned(static_cast<const float*>(matrix.q_local), matrix.cols) &
                 is_aligned(static_cast<const float*>(matrix.q_warm), matrix.cols);
  rows.gradient_dtype = bucket.gradient_dtype;
  return rows;
}

// Rows that are loaded at a time. More would not fit into registers alongside the sums.
constexpr int kLoadedRows = 4;

// A lane's part of the gradient and of memory, as they are stored, from row `first` on. All loads
// are issued before any element is widened, because a conversion waits for its load.
template <typename G, typename M>
struct StoredElements {
  G gradient[kLoadedRows][4];
  M memory[kLoadedRows][4];

  template <int kRows>
  __device__ __forceinline__ void load(const Rows<kRows, G, M>& rows, int first, int col,
                                       const LaneColumns& columns) {
    const LaneColumns of_gradient{rows.gradient_aligned, columns.count};
    POWERSGD_UNROLL
    for (int i = 0; i < kLoadedRows; ++i)
      load_stored<Access::kNonTemporal>(rows.gradient + rows.offset(first + i) + col, of_gradient,
                                        gradient[i]);
    if (!rows.has_memory()) return;
    POWERSGD_UNROLL
    for (int i = 0; i < kLoadedRows; ++i)
      load_stored<Access::kNonTemporal>(rows.memory + rows.offset(first + i) + col, columns,
                                        memory[i]);
  }
};

// One instruction per element: 0 times a non-finite value is NaN.
__device__ __forceinline__ bool are_finite(const float (&values)[kLoadedRows][4]) {
  float zeros[4] = {};
  POWERSGD_UNROLL
  for (int i = 0; i < kLoadedRows; ++i) {
    POWERSGD_UNROLL
    for (int j = 0; j < 4; ++j) zeros[j] += values[i][j] * 0.0f;
  }
  return zeros[0] + zeros[1] + (zeros[2] + zeros[3]) == 0;
}

// Replaces the non-finite elements of the gradient by 0, and notes that there are some.
__device__ __forceinline__ void examine_gradient(float (&gradient)[kLoadedRows][4],
                                                 volatile int* non_finite) {
  if (are_finite(gradient)) return;
  POWERSGD_UNROLL
  for (int i = 0; i < kLoadedRows; ++i) replace_non_finite(gradient[i]);
  *non_finite = 1;
}

// m = scale * memory + gradient, where memory still holds M of the last step.
template <int kRows, typename G, typename M>
__device__ __forceinline__ void add_gradient(const Rows<kRows, G, M>& rows,
                                             const StoredElements<G, M>& stored,
                                             float (&m)[kLoadedRows][4], volatile int* non_finite) {
  with_dtype<G>(rows.gradient_dtype, [&](DType dtype) {
    POWERSGD_UNROLL
    for (int i = 0; i < kLoadedRows; ++i) widen_columns(stored.gradient[i], dtype, m[i]);
  });
  examine_gradient(m, non_finite);
  if (!rows.has_memory()) return;
  POWERSGD_UNROLL
  for (int i = 0; i < kLoadedRows; ++i) {
    float memory[4];
    widen_columns(stored.memory[i], kMemoryDType<M>, memory);
    POWERSGD_UNROLL
    for (int j = 0; j < 4; ++j) m[i][j] = rows.scale() * memory[j] + m[i][j];
  }
}

// m -= p q for one row q of q_local at a lane's columns. p points to kLoadedRows elements of a
// column of scale * p_hat.
__device__ __forceinline__ void subtract_product(const float* p, const float (&q)[4],
                                                 float (&m)[kLoadedRows][4]) {
  POWERSGD_UNROLL
  for (int i = 0; i < kLoadedRows; ++i) {
    const float factor = p[i];
    POWERSGD_UNROLL
    for (int j = 0; j < 4; ++j) m[i][j] -= factor * q[j];
  }
}

// Clamps a row of M to the range of memory, and rounds it to memory's dtype.
template <typename M>
__device__ __forceinline__ void round_to_memory(float (&m)[4], M (&stored)[4]) {
  const float limit = kLargestInMemory<M>;
  bool fits = true;
  POWERSGD_UNROLL
  for (int j = 0; j < 4; ++j) fits = fits & (fabs(m[j]) <= limit);
  if (!fits) {
    POWERSGD_UNROLL
    for (int j = 0; j < 4; ++j) m[j] = clamp_to(m[j], limit);
  }
  narrow_columns(m, kMemoryDType<M>, stored);
  widen_columns(stored, kMemoryDType<M>, m);
}

// Stores M in memory, and sets m to what memory holds.
template <int kRows, typename G, typename M>
__device__ __forceinline__ void store_m(const Rows<kRows, G, M>& rows, int first, int col,
                                        const LaneColumns& columns, float (&m)[kLoadedRows][4]) {
  if (!rows.has_memory()) return;
  POWERSGD_UNROLL
  for (int i = 0; i < kLoadedRows; ++i) {
    M stored[4];
    round_to_memory(m[i], stored);
    if (first + i < rows.count)
      store_stored<Access::kReuse>(rows.memory + rows.offset(first + i) + col, columns, stored);
  }
}

}  // namespace powersgd::kernels::cuda
