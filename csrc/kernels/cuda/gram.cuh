// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "kernels/cuda/reduce.cuh"
#include "kernels/shared/layout.h"

// Gram matrices in double.
//
// The columns are cut into panels of 8. A product of two panels is the 8x8 that the lanes of a warp
// hold: with g = lane / 4 and t = lane % 4, elements (g, 2t) and (g, 2t + 1).

namespace powersgd::kernels::cuda {

constexpr int kPanel = 8;
constexpr int kProductElements = kPanel * kPanel;
constexpr int kRowsPerStep = 4;
constexpr int kGramBatch = 4;  // steps whose loads are under way at a time

template <int N>
constexpr int kProducts = N * (N + 1) / 2;  // of N panels, a lower triangle

// c += a b for a warp, as 8x8 += 8x4 4x8. The lanes hold a(g, t) and b(t, g).
__device__ __forceinline__ void multiply_add(double (&c)[2], double a, double b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
      : "+d"(c[0]), "+d"(c[1])
      : "d"(a), "d"(b));
#else
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  POWERSGD_UNROLL
  for (int k = 0; k < 4; ++k) {
    const double left = __shfl_sync(kAllLanes, a, lane / 4 * 4 + k);
    POWERSGD_UNROLL
    for (int i = 0; i < 2; ++i)
      c[i] += left * __shfl_sync(kAllLanes, b, (lane % 4 * 2 + i) * 4 + k);
  }
#endif
}

// Adds the products of N panels, over every step-th kRowsPerStep rows from `begin` on. In each
// panel the lane takes one column, or none (-1), at whose place there is a 0.
template <int N>
__device__ __forceinline__ void multiply_panels(const TallFactor& x, int64_t begin, int64_t end,
                                                int64_t step, const int64_t (&column)[N],
                                                double (&sum)[kProducts<N>][2]) {
  POWERSGD_NO_UNROLL
  for (int64_t first = begin; first < end; first += kGramBatch * step) {
    float a[kGramBatch][N];
    POWERSGD_UNROLL
    for (int k = 0; k < kGramBatch; ++k) {
      const int64_t row = first + k * step + lane_id() % kRowsPerStep;
      POWERSGD_UNROLL
      for (int i = 0; i < N; ++i) a[k][i] = row < end && column[i] >= 0 ? x.at(row, column[i]) : 0;
    }
    POWERSGD_UNROLL
    for (int k = 0; k < kGramBatch; ++k) {
      POWERSGD_UNROLL
      for (int i = 0; i < N; ++i) {
        POWERSGD_UNROLL
        for (int j = 0; j <= i; ++j) multiply_add(sum[i * (i + 1) / 2 + j], a[k][i], a[k][j]);
      }
    }
  }
}

// The lane's column in a panel.
__device__ __forceinline__ int64_t column_in_panel(int64_t panel, int64_t rank) {
  const int64_t column = panel * kPanel + lane_id() / 4;
  return column < rank ? column : -1;
}

// The lower triangle of X^T X over rows [begin, end) of X, at ranks up to R: element (i, j) to
// out(i, j, value). All threads of the block call it. The warps share the rows; their sums are
// added in `shared`, of kGramSharedBytes<R>, always in the same order.
template <int R>
constexpr int kGramElements = kProducts<(R + kPanel - 1) / kPanel> * kProductElements;
template <int R>
constexpr size_t kGramSharedBytes = sizeof(double) * kWarps * kGramElements<R>;

template <int R, typename Out>
__device__ __forceinline__ void gram(const TallFactor& x, int64_t begin, int64_t end, int64_t rank,
                                     double* shared, const Out& out) {
  constexpr int kPanels = (R + kPanel - 1) / kPanel;
  int64_t column[kPanels];
  POWERSGD_UNROLL
  for (int i = 0; i < kPanels; ++i) column[i] = column_in_panel(i, rank);
  double sum[kProducts<kPanels>][2] = {};
  multiply_panels(x, begin + warp_id() * kRowsPerStep, end, kWarps * kRowsPerStep, column, sum);
  POWERSGD_UNROLL
  for (int i = 0; i < kProducts<kPanels>; ++i)
    reinterpret_cast<double2*>(
        shared)[(warp_id() * kProducts<kPanels> + i) * kWarpSize + lane_id()] =
        make_double2(sum[i][0], sum[i][1]);
  __syncthreads();
  for (int i = threadIdx.x; i < kGramElements<R>; i += kThreads) {
    double total = 0;
    POWERSGD_UNROLL
    for (int warp = 0; warp < kWarps; ++warp) total += shared[warp * kGramElements<R> + i];
    const int product = i / kProductElements, element = i % kProductElements;
    int panel = 0;
    POWERSGD_UNROLL
    for (int next = 1; next < kPanels; ++next) panel += product >= next * (next + 1) / 2 ? 1 : 0;
    const int row = panel * kPanel + element / kPanel;
    const int other = (product - panel * (panel + 1) / 2) * kPanel + element % kPanel;
    if (row < rank && other <= row) out(row, other, total);
  }
}

}  // namespace powersgd::kernels::cuda
