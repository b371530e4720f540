// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "kernels/cuda/form_m.cuh"
#include "kernels/cuda/project_sums.cuh"

// A tile of project at a rank whose factors do not fit into shared memory, and in double. The
// columns of P are computed R at a time. The first R form M, the others load it again.

namespace powersgd::kernels::cuda {

// Loads M again. A lane reads what it wrote.
template <int kRows, typename F, typename G, typename M>
__device__ void reload_m(const Rows<kRows, F, G, M>& rows, int col, const LaneColumns& columns,
                         F (&m)[kRows][4]) {
  for (int i = 0; i < kRows; ++i) {
    if (rows.has_memory()) {
      load_columns<Access::kReuse>(rows.memory + rows.offset(i) + col, columns, rows.residual_dtype,
                                   m[i]);
    } else {
      load_columns<Access::kReuse>(rows.gradient + rows.offset(i) + col,
                                   LaneColumns{rows.gradient_aligned, columns.count},
                                   rows.gradient_dtype, m[i]);
      replace_non_finite(m[i]);
    }
  }
}

template <int kRows, typename F, typename G, typename M>
__device__ void form_m_at_any_rank(const Rows<kRows, F, G, M>& rows, const F* q_local, int col,
                                   const LaneColumns& columns, F (&m)[kRows][4],
                                   ElementFlags* flags) {
  StoredElements<G, M> stored;
  stored.load(rows, 0, col, columns);
  add_gradient(rows, stored, m, flags);
  for (int k = 0; rows.has_memory() && k < rows.rank(); ++k) {
    F p[kRows], q[4];
    POWERSGD_UNROLL
    for (int i = 0; i < kRows; ++i)
      p[i] = rows.scale() * rows.p_hat[(i < rows.count ? i : 0) * int64_t{rows.rank()} + k];
    load_columns<Access::kReuse>(q_local + int64_t{k} * rows.cols + col, columns, DType::kFloat32,
                                 q);
    subtract_product(p, q, m);
  }
  store_m(rows, 0, col, columns, m, flags);
}

template <int R, typename F, typename G, typename M>
__device__ void project_tile_of_any_rank(const Bucket& bucket, Work* work) {
  constexpr int kRows = project_rows_per_warp(kMaxFastRank + 1, sizeof(F) == 8);
  const int first = static_cast<int>(threadIdx.x) / kWarpSize * kRows;
  const auto rows = rows_of<kRows, F, G, M>(bucket, *work, first);
  share_residual_scale(bucket, work);
  const int width =
      rows.count > 0 ? static_cast<int>(work->tile.col_end - work->tile.col_begin) : 0;
  const F* const q_local = static_cast<const F*>(work->matrix.q_local) + work->tile.col_begin;
  const F* const q_warm = static_cast<const F*>(work->matrix.q_warm) + work->tile.col_begin;
  for (int k0 = 0; k0 < rows.rank(); k0 += R) {
    F sums[kRows * R] = {};
    for (int col = static_cast<int>(threadIdx.x) % kWarpSize * 4; col < width; col += kStrip) {
      const LaneColumns columns = rows.columns(col, width);
      F m[kRows][4];
      if (k0 == 0)
        form_m_at_any_rank(rows, q_local, col, columns, m, &work->flags);
      else
        reload_m(rows, col, columns, m);
      POWERSGD_UNROLL
      for (int k = 0; k < R; ++k) {
        if (k0 + k >= rows.rank()) continue;
        F q[4];
        load_columns<Access::kReuse>(q_warm + int64_t{k0 + k} * rows.cols + col, columns,
                                     DType::kFloat32, q);
        POWERSGD_UNROLL
        for (int i = 0; i < kRows; ++i) {
          POWERSGD_UNROLL
          for (int j = 0; j < 4; ++j) sums[i * R + k] += m[i][j] * q[j];
        }
      }
    }
    write_lane_sums<R, kRows>(bucket, *work, first, k0, sums);
  }
}

}  // namespace powersgd::kernels::cuda
