// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "elements.cuh"

// Phases 1 to 3 of project.cu: what one warp does with four rows.

namespace powersgd::kernels::cuda {

constexpr int kRows = kRowsPerWarp;

// What a warp works on: pointers to its first row and to the tile's first column. F is the factor
// type, G and M how the gradient and the memory are stored.
template <typename F, typename G, typename M>
struct Rows {
  const G* gradient;
  M* memory;       // null: M is the gradient
  const F* p_hat;  // the first row's
  const F* q_local;
  const F* q_warm;
  int64_t cols;
  int rank;
  int begin, end, step;  // columns of the tile, for this lane
  int count;             // rows that exist, of kRows
  DType gradient_dtype, memory_dtype;
  F scale;

  // A row beyond the last repeats the first, and is not stored.
  __device__ int64_t offset(int row) const { return row < count ? row * cols : 0; }
};

template <int W, typename F>
__device__ __forceinline__ bool replace_non_finite(F (&value)[W]) {
  bool bad = false;
  POWERSGD_UNROLL
  for (int j = 0; j < W; ++j) {
    const bool finite = is_finite(value[j]);
    bad = bad || !finite;
    value[j] = finite ? value[j] : F{0};
  }
  return bad;
}

// m -= scale p_hat q_local at a lane's columns. p is scale p_hat as [R][kRows], of which `rank`
// rows count.
template <int R, bool kExact, int W, typename F, typename G, typename M>
__device__ __forceinline__ void subtract_last_step(const Rows<F, G, M>& rows, int k0, int col,
                                                   const F* p, F (&m)[kRows][W]) {
  // Rolled up, for the compiler would load all of q_local at once, for want of registers elsewhere.
  constexpr int kAtOnce = R < 2 ? 1 : R <= 8 ? 2 : 4;
  const F* q_row = rows.q_local + k0 * rows.cols + col;
  POWERSGD_NO_UNROLL
  for (int k = 0; k < R; k += kAtOnce) {
    POWERSGD_UNROLL
    for (int n = 0; n < kAtOnce; ++n) {
      if (!kExact && k0 + k + n >= rows.rank) continue;
      F q[W];
      load_columns<Access::kReuse>(q_row, DType::kFloat32, q);
      q_row += rows.cols;
      POWERSGD_UNROLL
      for (int i = 0; i < kRows; ++i) {
        const F factor = p[(k + n) * kRows + i];
        POWERSGD_UNROLL
        for (int j = 0; j < W; ++j) m[i][j] -= factor * q[j];
      }
    }
  }
}

// The same for ranks above R, which do not fit into shared memory.
template <int W, typename F, typename G, typename M>
__device__ void subtract_high_rank(const Rows<F, G, M>& rows, int col, F (&m)[kRows][W]) {
  for (int k = 0; k < rows.rank; ++k) {
    F p[kRows];
    POWERSGD_UNROLL
    for (int i = 0; i < kRows; ++i)
      p[i] = rows.scale * rows.p_hat[(i < rows.count ? i : 0) * int64_t{rows.rank} + k];
    Rows<F, G, M> one = rows;
    one.rank = k + 1;
    subtract_last_step<1, true, W>(one, k, col, p, m);
  }
}

// Phases 1 and 2: M of kRows x 4 elements. True if the gradient held a non-finite one.
template <int R, bool kAnyRank, bool kExact, int W, typename F, typename G, typename M>
__device__ __forceinline__ bool form_m(const Rows<F, G, M>& rows, int col, const F* p,
                                       F (&m)[kRows][W]) {
  F g[kRows][W];
  POWERSGD_UNROLL
  for (int i = 0; i < kRows; ++i)
    load_columns<Access::kStream>(rows.gradient + rows.offset(i) + col, rows.gradient_dtype, g[i]);
  bool bad = false;
  if (rows.memory == nullptr) {
    POWERSGD_UNROLL
    for (int i = 0; i < kRows; ++i) {
      bad = replace_non_finite(g[i]) || bad;
      POWERSGD_UNROLL
      for (int j = 0; j < W; ++j) m[i][j] = g[i][j];
    }
    return bad;
  }
  POWERSGD_UNROLL
  for (int i = 0; i < kRows; ++i)
    load_columns<Access::kStream>(rows.memory + rows.offset(i) + col, rows.memory_dtype, m[i]);
  // With the gradient added first, its registers are free for the factors.
  POWERSGD_UNROLL
  for (int i = 0; i < kRows; ++i) {
    bad = replace_non_finite(g[i]) || bad;
    POWERSGD_UNROLL
    for (int j = 0; j < W; ++j) m[i][j] = rows.scale * m[i][j] + g[i][j];
  }
  if constexpr (kAnyRank)
    subtract_high_rank<W>(rows, col, m);
  else
    subtract_last_step<R, kExact, W>(rows, 0, col, p, m);
  const F limit = largest<M>(rows.memory_dtype);
  POWERSGD_UNROLL
  for (int i = 0; i < kRows; ++i) {
    POWERSGD_UNROLL
    for (int j = 0; j < W; ++j)
      m[i][j] = widen(narrow<M>(clamp_to(m[i][j], limit), rows.memory_dtype), rows.memory_dtype);
    if (i < rows.count)
      store_columns<Access::kReuse>(rows.memory + rows.offset(i) + col, rows.memory_dtype, m[i]);
  }
  return bad;
}

// M again, for the second and further R columns of P of a high rank: a lane reads what it wrote.
template <int W, typename F, typename G, typename M>
__device__ void reload_m(const Rows<F, G, M>& rows, int col, F (&m)[kRows][W]) {
  for (int i = 0; i < kRows; ++i) {
    if (rows.memory != nullptr) {
      load_columns<Access::kReuse>(rows.memory + rows.offset(i) + col, rows.memory_dtype, m[i]);
    } else {
      load_columns<Access::kReuse>(rows.gradient + rows.offset(i) + col, rows.gradient_dtype, m[i]);
      replace_non_finite(m[i]);
    }
  }
}

// Phases 1 to 3 for columns [k0, k0 + R) of P.
template <int R, bool kAnyRank, bool kExact, int W, typename F, typename G, typename M>
__device__ __forceinline__ bool project_rows(Rows<F, G, M> rows, int k0, const F* p,
                                             F (&sums)[kRows * R]) {
  bool bad = false;
  int start = 0;
  POWERSGD_UNROLL
  for (int i = 0; i < kRows * R; ++i) sums[i] = 0;
  POWERSGD_NO_UNROLL
  for (int col = rows.begin; col < rows.end; col += rows.step) {
    F m[kRows][W];
    forget(rows.cols);
    forget(start);
    if (!kAnyRank || k0 == 0)
      bad = form_m<R, kAnyRank, kExact, W>(rows, col, p + start, m) || bad;
    else
      reload_m<W>(rows, col, m);
    const F* q_row = rows.q_warm + k0 * rows.cols + col;
    POWERSGD_UNROLL
    for (int k = 0; k < R; ++k) {
      if (!kExact && k0 + k >= rows.rank) continue;
      F q[W];
      load_columns<Access::kReuse>(q_row, DType::kFloat32, q);
      q_row += rows.cols;
      POWERSGD_UNROLL
      for (int i = 0; i < kRows; ++i) {
        POWERSGD_UNROLL
        for (int j = 0; j < W; ++j) sums[i * R + k] += m[i][j] * q[j];
      }
    }
  }
  return bad;
}

}  // namespace powersgd::kernels::cuda
