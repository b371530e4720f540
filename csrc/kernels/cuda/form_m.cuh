// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "kernels/cuda/elements.cuh"
#include "kernels/cuda/work.cuh"

// M, the sum of the residual and the gradient, at four rows of a lane's columns. project reads the
// gradient and memory here alone.

namespace powersgd::kernels::cuda {

constexpr int kRows = kRowsPerWarp;

// Four rows of a matrix, by pointers to the first row at the tile's first column. F is the factor
// type. G and M say how the gradient and memory are stored.
template <typename F, typename G, typename M>
struct Rows {
  const G* gradient;
  M* memory;       // null: M is the gradient
  const F* p_hat;  // the first row; the last step sent the product p_hat q_local
  const F* q_local;
  int64_t cols;
  int rank;
  int count;  // rows that exist, of kRows
  DType gradient_dtype, residual_dtype;
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
  // Not unrolled: otherwise the compiler loads all of q_local at once and runs out of registers.
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

// The same at ranks above R, whose factors do not fit into shared memory.
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

// Notes what the gradient's elements are like, and replaces the non-finite ones by 0.
template <int W, typename F>
__device__ __forceinline__ void examine_gradient(F (&gradient)[kRows][W], ElementFlags* flags) {
  uint32_t bits = 0;
  bool bad = false;
  POWERSGD_UNROLL
  for (int i = 0; i < kRows; ++i) {
    POWERSGD_UNROLL
    for (int j = 0; j < W; ++j) bits |= zero_bits(gradient[i][j]);
    bad = replace_non_finite(gradient[i]) || bad;
  }
  if (!all_zero(bits)) flags->non_zero = 1;
  if (bad) flags->non_finite = 1;
}

template <int W, typename F>
__device__ __forceinline__ void examine_m(const F (&m)[kRows][W], F limit, ElementFlags* flags) {
  bool saturated = false;
  POWERSGD_UNROLL
  for (int i = 0; i < kRows; ++i) {
    POWERSGD_UNROLL
    for (int j = 0; j < W; ++j) saturated = saturated || fabsf(m[i][j]) > limit;
  }
  if (saturated) flags->saturated = 1;
}

// Phases 1 and 2: M of kRows x W elements.
template <int R, bool kAnyRank, bool kExact, int W, typename F, typename G, typename M>
__device__ __forceinline__ void form_m(const Rows<F, G, M>& rows, int col, const F* p,
                                       F (&m)[kRows][W], ElementFlags* flags) {
  // Widened only after memory's loads are issued, because the conversion waits for the gradient.
  G stored[kRows][W];
  POWERSGD_UNROLL
  for (int i = 0; i < kRows; ++i)
    load_stored<Access::kNonTemporal>(rows.gradient + rows.offset(i) + col, stored[i]);
  if (rows.memory == nullptr) {
    POWERSGD_UNROLL
    for (int i = 0; i < kRows; ++i) widen_columns(stored[i], rows.gradient_dtype, m[i]);
    examine_gradient(m, flags);
    return;
  }
  POWERSGD_UNROLL
  for (int i = 0; i < kRows; ++i)
    load_columns<Access::kNonTemporal>(rows.memory + rows.offset(i) + col, rows.residual_dtype,
                                       m[i]);
  F g[kRows][W];
  POWERSGD_UNROLL
  for (int i = 0; i < kRows; ++i) widen_columns(stored[i], rows.gradient_dtype, g[i]);
  examine_gradient(g, flags);
  // The gradient is added first, so that its registers are free for the factors.
  POWERSGD_UNROLL
  for (int i = 0; i < kRows; ++i) {
    POWERSGD_UNROLL
    for (int j = 0; j < W; ++j) m[i][j] = rows.scale * m[i][j] + g[i][j];
  }
  if constexpr (kAnyRank)
    subtract_high_rank<W>(rows, col, m);
  else
    subtract_last_step<R, kExact, W>(rows, 0, col, p, m);
  const F limit = largest<M>(rows.residual_dtype);
  if (sizeof(M) == 2 && rows.residual_dtype == DType::kFloat16) examine_m(m, limit, flags);
  POWERSGD_UNROLL
  for (int i = 0; i < kRows; ++i) {
    POWERSGD_UNROLL
    for (int j = 0; j < W; ++j)
      m[i][j] =
          widen(narrow<M>(clamp_to(m[i][j], limit), rows.residual_dtype), rows.residual_dtype);
    if (i < rows.count)
      store_columns<Access::kReuse>(rows.memory + rows.offset(i) + col, rows.residual_dtype, m[i]);
  }
}

// Loads M again for all but the first R rows of q_warm at a high rank. A lane reads what it wrote.
template <int W, typename F, typename G, typename M>
__device__ void reload_m(const Rows<F, G, M>& rows, int col, F (&m)[kRows][W]) {
  for (int i = 0; i < kRows; ++i) {
    if (rows.memory != nullptr) {
      load_columns<Access::kReuse>(rows.memory + rows.offset(i) + col, rows.residual_dtype, m[i]);
    } else {
      load_columns<Access::kReuse>(rows.gradient + rows.offset(i) + col, rows.gradient_dtype, m[i]);
      replace_non_finite(m[i]);
    }
  }
}

}  // namespace powersgd::kernels::cuda
