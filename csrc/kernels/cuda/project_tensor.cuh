// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "kernels/cuda/form_m.cuh"
#include "kernels/cuda/panels.cuh"
#include "kernels/cuda/project_sums.cuh"
#include "kernels/cuda/tensor_cores.cuh"

// A tile of project on tensor cores, for ranks 9 to 32.
//
// A warp takes 16 columns of each strip, for all 32 rows of the tile. It forms p_hat q_local as
// fragments C. M has the same layout, and that is A of P = M q_warm^T as it stands. The warps'
// parts of P are added at the end, in their order. In the order of its fragments a lane has
//   - rows g, g + 8, g + 16 and g + 24, of which two are those of an A or C;
//   - four adjacent columns: 2n + b is column n of the b-th C, and the inner index of the b-th A.

namespace powersgd::kernels::cuda {

template <int R, typename G, typename M>
class ProjectOnTensorCores {
 public:
  // q_local and q_warm take turns where shared memory has no room for both.
  static constexpr bool kBothFactors = R <= 16;
  // Two rows are 8 banks apart.
  using FactorPanels = Panels<kBothFactors ? 2 * R : R, float, kStrip + 8>;
  static constexpr size_t kSharedBytes = sizeof(Work) + sizeof(float) * FactorPanels::kElements;

  __device__ ProjectOnTensorCores(const Bucket& bucket, Work* work)
      : rows_(rows_of<kLoadedRows, float, G, M, 8>(bucket, *work, lane_group())),
        work_(work),
        shared_(reinterpret_cast<float*>(work + 1)),
        panels_(shared_) {
    load_p();
  }

  // Adds up the warp's part of P.
  __device__ __forceinline__ void run() {
    fetch_first(0);
    const int cols = static_cast<int>(work_->tile.col_end - work_->tile.col_begin);
    POWERSGD_NO_UNROLL
    for (int begin = 0; begin < cols; begin += kStrip) {
      const bool warp_active = begin + warp_column() < cols;
      col_ = begin + warp_column() + 4 * lane_in_group();
      active_ = col_ < cols && rows_.count > 0;
      hide_from_optimizer(rows_.cols);
      if (active_) stored_.load(rows_, 0, col_, columns());
      panels_.turn();
      if constexpr (kBothFactors)
        fetch_first(begin + kStrip);
      else
        fetch(work_->matrix.q_warm, begin);
      float m[kLoadedRows][4] = {};
      if (warp_active) form_m(m);
      if constexpr (!kBothFactors) {
        panels_.turn();
        fetch_first(begin + kStrip);
      }
      if (warp_active) multiply(m);
    }
    __pipeline_wait_prior(0);
  }

  // Adds the sums of the warps, and writes P.
  template <typename Write>
  __device__ __forceinline__ void finish(const Write& write) {
    static_assert(kWarps * kRows * R <= FactorPanels::kElements);
    __syncthreads();
    float* const sums = shared_;  // [kWarps][kRows][R]
    POWERSGD_UNROLL
    for (int a = 0; a < 2; ++a) {
      POWERSGD_UNROLL
      for (int r = 0; r < R / 8; ++r) {
        POWERSGD_UNROLL
        for (int c = 0; c < 4; ++c) {
          const int row = 16 * a + 8 * (c / 2) + lane_group();
          const int k = 8 * r + rank_of(2 * lane_in_group() + c % 2);
          sums[(warp() * kRows + row) * R + k] = sums_[a][r][c];
        }
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kRows * R; i += kThreads) {
      float sum = 0;
      POWERSGD_UNROLL
      for (int w = 0; w < kWarps; ++w) sum += sums[w * kRows * R + i];
      write(i / R, i % R, sum);
    }
  }

 private:
  static constexpr int kRows = kWarps * project_rows_per_warp(R, false);  // of a tile
  static_assert(kRows == 8 * kLoadedRows, "a lane has four rows, 8 apart");

  __device__ static int warp() { return static_cast<int>(threadIdx.x) / kWarpSize; }
  __device__ static int warp_column() { return 16 * warp(); }
  // The rank that is column n of a C, of each 8. Lanes that load at the same time find theirs 16
  // banks apart, and so the bits 0 and 1 change places.
  __device__ static int rank_of(int n) { return (n & 4) | (n & 2) >> 1 | (n & 1) << 1; }

  __device__ __forceinline__ LaneColumns columns() const {
    return rows_.columns(col_, static_cast<int>(work_->tile.col_end - work_->tile.col_begin));
  }

  // Begins to copy a strip of a factor. What this takes is in shared memory, and not in registers.
  __device__ __forceinline__ void fetch(const void* factor, int begin, int panel_row = 0) {
    panels_.template fetch<R>(global(static_cast<const float*>(factor)), work_->matrix,
                              rows_.aligned, work_->tile.col_begin + begin, work_->tile.col_end,
                              panel_row);
  }

  __device__ __forceinline__ void fetch_first(int begin) {
    fetch(work_->matrix.q_local, begin);
    if constexpr (kBothFactors) fetch(work_->matrix.q_warm, begin, R);
  }

  // The tile's rows of scale * p_hat, with zeros beyond the rank.
  __device__ __forceinline__ void load_p() {
    if (rows_.memory == nullptr) return;
    POWERSGD_UNROLL
    for (int a = 0; a < 2; ++a) {
      POWERSGD_UNROLL
      for (int k = 0; k < R / kInner; ++k) {
        POWERSGD_UNROLL
        for (int i = 0; i < 4; ++i) {
          const int row = 2 * a + i % 2, rank = kInner * k + lane_in_group() + 4 * (i / 2);
          const int existing = row < rows_.count ? row : 0;  // as in Rows::offset()
          const float* const p = rows_.p_hat + 8 * existing * rows_.rank + rank;
          p_[a][k].set(i, rank < rows_.rank ? rows_.scale * *p : 0);
        }
      }
    }
  }

  // M, from the stored elements. q_local is in the panel's first rows.
  __device__ __forceinline__ void form_m(float (&m)[kLoadedRows][4]) {
    FragmentC product[2][2] = {};
    if (rows_.memory != nullptr) multiply_factors(product);
    if (!active_) return;
    add_gradient(rows_, stored_, m, &work_->flags);
    POWERSGD_UNROLL
    for (int i = 0; i < kLoadedRows; ++i) {
      POWERSGD_UNROLL
      for (int j = 0; j < 4; ++j) m[i][j] -= product[i / 2][j % 2][2 * (i % 2) + j / 2];
    }
    hide_from_optimizer(rows_.cols);
    store_m(rows_, 0, col_, columns(), m, &work_->flags);
  }

  __device__ __forceinline__ void multiply_factors(FragmentC (&product)[2][2]) {
    POWERSGD_UNROLL
    for (int k = 0; k < R / kInner; ++k) {
      FragmentB q[2];
      POWERSGD_UNROLL
      for (int half = 0; half < 2; ++half) {
        const float2 pair =
            *reinterpret_cast<const float2*>(panels_.row(kInner * k + lane_in_group() + 4 * half) +
                                             warp_column() + 2 * lane_group());
        q[0].set(half, pair.x);
        q[1].set(half, pair.y);
      }
      POWERSGD_UNROLL
      for (int a = 0; a < 2; ++a) {
        POWERSGD_UNROLL
        for (int b = 0; b < 2; ++b) multiply_add(product[a][b], p_[a][k], q[b]);
      }
    }
  }

  // Adds m q_warm^T. q_warm is in the panel's last rows.
  __device__ __forceinline__ void multiply(const float (&m)[kLoadedRows][4]) {
    FragmentA left[2][2];
    POWERSGD_UNROLL
    for (int i = 0; i < kLoadedRows; ++i) {
      POWERSGD_UNROLL
      for (int j = 0; j < 4; ++j) left[i / 2][j % 2].set(i % 2 + 2 * (j / 2), m[i][j]);
    }
    POWERSGD_UNROLL
    for (int r = 0; r < R / 8; ++r) {
      float q[4];
      load_columns<Access::kReuse>(
          panels_.row((kBothFactors ? R : 0) + 8 * r + rank_of(lane_group())) + warp_column() +
              4 * lane_in_group(),
          DType::kFloat32, q);
      POWERSGD_UNROLL
      for (int b = 0; b < 2; ++b) {
        FragmentB right;
        right.set(0, q[b]);
        right.set(1, q[b + 2]);
        POWERSGD_UNROLL
        for (int a = 0; a < 2; ++a) multiply_add(sums_[a][r], left[a][b], right);
      }
    }
  }

  Rows<kLoadedRows, float, G, M, 8> rows_;
  Work* const work_;
  float* const shared_;
  FactorPanels panels_;
  StoredElements<G, M> stored_;
  FragmentA p_[2][R / kInner];
  FragmentC sums_[2][R / 8] = {};
  int col_ = 0;
  bool active_ = false;
};

template <int R, typename G, typename M>
__device__ __forceinline__ void project_tensor_tile(const Bucket& bucket, Work* work) {
  ProjectOnTensorCores<R, G, M> tensor(bucket, work);
  tensor.run();
  tensor.finish(sum_writer<float>(bucket, *work));
}

}  // namespace powersgd::kernels::cuda
