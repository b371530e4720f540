// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <type_traits>

#include "kernels/cuda/form_m.cuh"
#include "kernels/cuda/panels.cuh"
#include "kernels/cuda/project_sums.cuh"
#include "kernels/cuda/tensor_cores.cuh"

// A tile of project up to rank 32: M is formed in float, and then multiplied by q_warm in one of
// two ways, which also say which rows and columns of a strip a lane has.

namespace powersgd::kernels::cuda {

// The rows of a tile.
template <int R>
constexpr int kProjectRows = kWarps * project_rows_per_warp(R);

// Float products. A warp takes some rows and all columns of a strip, a lane four of them.
template <int R>
class FloatProducts {
 public:
  static constexpr int kRank = R;
  static constexpr int kRows = project_rows_per_warp(R);  // of a lane
  static constexpr int kStride = kStrip;                  // of a strip's rows
  static constexpr int kSharedElements = 0;               // that finish() needs
  static constexpr bool kWholeWarps = false;

  __device__ static int row() { return warp_id() * kRows; }
  __device__ static int column() { return lane_id() * 4; }

  // Adds m q_warm^T, for kLoadedRows rows from the lane's row `first` on.
  __device__ __forceinline__ void add(int first, const float (&m)[kLoadedRows][4],
                                      const float* q_warm) {
    POWERSGD_UNROLL
    for (int k = 0; k < R; ++k) {
      float q[4];
      load_stored<Access::kShared>(q_warm + k * kStride + column(), q);
      POWERSGD_UNROLL
      for (int i = 0; i < kLoadedRows; ++i) {
        POWERSGD_UNROLL
        for (int j = 0; j < 4; ++j) sums_[(first + i) * R + k] += m[i][j] * q[j];
      }
    }
  }

  __device__ __forceinline__ void finish(const Bucket& bucket, const Work& work, float*) {
    write_lane_sums<R, kRows>(bucket, work, row(), sums_);
  }

 private:
  float sums_[kRows * R] = {};
};

// Products on tensor cores, of operands that are rounded to bfloat16. A warp takes all rows of the
// tile and 16 columns of a strip. A lane has the rows 4g to 4g + 3, of which two are those of an A
// or C, and the columns 4t to 4t + 3, which are inner indices.
template <int R>
class Bfloat16Products {
 public:
  static constexpr int kRank = R;
  static constexpr int kRows = kLoadedRows;
  static constexpr int kStride = kStrip + 16;  // two rows are 16 banks apart
  static constexpr bool kWholeWarps = true;
  static constexpr int kSharedElements = kWarps * kProjectRows<R> * R;
  static_assert(kProjectRows<R> == 8 * kRows && kStrip == kWarps * kInner);

  __device__ static int row() { return lane_group() * kRows; }
  __device__ static int column() { return warp_id() * kInner + 4 * lane_in_group(); }

  __device__ __forceinline__ void add(int, const float (&m)[kLoadedRows][4], const float* q_warm) {
    FragmentA left[2];
    POWERSGD_UNROLL
    for (int i = 0; i < 8; ++i)
      left[i / 4][i % 4] = pack_bfloat16(m[i / 4 * 2 + i % 2][i % 4 / 2 * 2],
                                         m[i / 4 * 2 + i % 2][i % 4 / 2 * 2 + 1]);
    POWERSGD_UNROLL
    for (int r = 0; r < R / 8; ++r) {
      float q[4];
      load_stored<Access::kShared>(q_warm + (8 * r + lane_group()) * kStride + column(), q);
      const FragmentB right = {pack_bfloat16(q[0], q[1]), pack_bfloat16(q[2], q[3])};
      mma(sums_[0][r], left[0], right);
      mma(sums_[1][r], left[1], right);
    }
  }

  // Adds the sums of the warps, in their order.
  __device__ __forceinline__ void finish(const Bucket& bucket, const Work& work, float* shared) {
    __syncthreads();
    // shared is [kWarps][kProjectRows][R]
    POWERSGD_UNROLL
    for (int i = 0; i < R; ++i) {
      const int a = i % 2, c = i / 2 % 4, r = i / 8;
      const int k = 8 * r + 2 * lane_in_group() + c % 2;
      shared[(warp_id() * kProjectRows<R> + row() + 2 * a + c / 2) * R + k] = sums_[a][r][c];
    }
    __syncthreads();
    const auto write = sum_writer(bucket, work);
    for (int i = threadIdx.x; i < kProjectRows<R> * R; i += kThreads) {
      float sum = 0;
      POWERSGD_UNROLL
      for (int w = 0; w < kWarps; ++w) sum += shared[w * kProjectRows<R> * R + i];
      write(i / R, i % R, sum);
    }
  }

 private:
  FragmentC sums_[2][R / 8] = {};
};

// A block's way through the strips of a tile.
template <typename Products, typename G, typename M>
class ProjectTile {
  static constexpr int R = Products::kRank, kRows = Products::kRows;
  // Up to rank 16 both factors are at hand, so that M of a few rows is made and used up at once.
  // Above, shared memory is too small for that, and q_local and q_warm take turns.
  static constexpr bool kBothFactors = R <= 16;
  using FactorPanels = Panels<kBothFactors ? 2 * R : R, Products::kStride>;
  static_assert(Products::kSharedElements <= FactorPanels::kElements);
  static constexpr int kElementsOfP = kProjectRows<R> * R;

 public:
  // Shared memory holds the work, then p_hat's rows, then the panels.
  static constexpr size_t kSharedBytes =
      sizeof(Work) + sizeof(float) * (kElementsOfP + FactorPanels::kElements);

  __device__ ProjectTile(const Bucket& bucket, Work* work)
      : rows_(rows_of<kRows, G, M>(bucket, *work, Products::row())),
        work_(work),
        p_(reinterpret_cast<float*>(work + 1)),
        panels_(p_ + kElementsOfP) {}

  // A whole tile is a separate case, so the compiler knows that all its rows exist and that vector
  // accesses reach them: that is a third of the instructions. So is one with only the gradient
  // unaligned, as behind a parameter of odd size.
  __device__ __forceinline__ void run(const Bucket& bucket) {
    const bool whole = work_->tile.row_end - work_->tile.row_begin == kProjectRows<R>;
    if (whole && rows_.aligned) {
      rows_.aligned = true;
      rows_.count = kRows;
      if (rows_.gradient_aligned) {
        rows_.gradient_aligned = true;
        take_strips(bucket);
      } else {
        rows_.gradient_aligned = false;
        take_strips(bucket);
      }
    } else {  // at a matrix's last rows: two answers would take more registers than there are
      rows_.gradient_aligned = rows_.aligned = rows_.gradient_aligned && rows_.aligned;
      take_strips(bucket);
    }
    products_.finish(bucket, *work_, p_ + kElementsOfP);
  }

 private:
  __device__ __forceinline__ void take_strips(const Bucket& bucket) {
    go_to(0);
    load(0);
    fetch_first(0);
    stage_p(bucket);
    POWERSGD_NO_UNROLL
    for (int begin = 0; begin < width(); begin += kStrip) {
      go_to(begin);
      hide_from_optimizer(rows_.cols);
      if (begin > 0) load(0);
      if constexpr (kBothFactors)
        take_strip_with_both(begin);
      else
        take_strip_in_turns(begin);
    }
  }

  __device__ __forceinline__ int width() const {
    return static_cast<int>(work_->tile.col_end - work_->tile.col_begin);
  }
  __device__ __forceinline__ LaneColumns columns() const { return rows_.columns(col_, width()); }

  __device__ __forceinline__ void load(int first) {
    if (active_) stored_.load(rows_, first, col_, columns());
  }

  // Begins to copy a strip of a factor. What this takes is in shared memory, and not in registers.
  __device__ __forceinline__ void fetch(const void* factor, int begin, int panel_row = 0) {
    panels_.template fetch<R>(global(static_cast<const float*>(factor)), work_->matrix,
                              rows_.aligned, work_->tile.col_begin + begin, work_->tile.col_end,
                              panel_row);
  }

  __device__ __forceinline__ void go_to(int begin) {
    col_ = begin + Products::column();
    active_ = col_ < width() && rows_.count > 0;
  }

  __device__ __forceinline__ void fetch_first(int begin) {
    fetch(work_->matrix.q_local, begin);
    if constexpr (kBothFactors) fetch(work_->matrix.q_warm, begin, R);
  }

  // The tile's rows of scale p_hat as [R][kProjectRows], with zeros beyond the rank. A row beyond
  // the last repeats the lane's first, as in Rows::offset().
  __device__ __forceinline__ void stage_p(const Bucket& bucket) {
    constexpr int kEach = (kElementsOfP + kThreads - 1) / kThreads;
    if (!rows_.has_memory()) return;
    const Tile& tile = work_->tile;
    const int count = static_cast<int>(tile.row_end - tile.row_begin);
    const float* const p_hat =
        global(static_cast<const float*>(work_->matrix.p_hat)) + tile.row_begin * rows_.rank();
    float loaded[kEach];
    POWERSGD_UNROLL
    for (int j = 0; j < kEach; ++j) {
      const int i = static_cast<int>(threadIdx.x) + j * kThreads;
      const int row = i % kProjectRows<R>, k = i / kProjectRows<R>;
      const int existing = row < count ? row : row - row % kRows;
      loaded[j] = existing < count && k < rows_.rank() ? p_hat[existing * rows_.rank() + k] : 0;
    }
    share_residual_scale(bucket, work_);
    POWERSGD_UNROLL
    for (int j = 0; j < kEach; ++j) {
      const int i = static_cast<int>(threadIdx.x) + j * kThreads;
      if (i < kElementsOfP) p_[i] = rows_.scale() * loaded[j];
    }
  }

  __device__ __forceinline__ void take_strip_with_both(int begin) {
    POWERSGD_UNROLL
    for (int first = 0; first < kRows; first += kLoadedRows) {
      hide_from_optimizer(rows_.cols);
      if (first > 0) load(first);
      if (first == 0) {
        panels_.turn();
        fetch_first(begin + kStrip);
      }
      float m[kLoadedRows][4] = {};
      if (active_) form_m(first, m);
      if (active_ || Products::kWholeWarps) products_.add(first, m, panels_.row(R));
    }
  }

  __device__ __forceinline__ void take_strip_in_turns(int begin) {
    static_assert(kBothFactors || kRows == kLoadedRows);
    float m[kLoadedRows][4] = {};
    panels_.turn();
    fetch(work_->matrix.q_warm, begin);
    if (active_) form_m(0, m);
    panels_.turn();
    fetch_first(begin + kStrip);
    products_.add(0, m, panels_.row(0));
  }

  // M of kLoadedRows rows, from those stored. q_local is in the panel's first rows.
  __device__ __forceinline__ void form_m(int first, float (&m)[kLoadedRows][4]) {
    add_gradient(rows_, stored_, m, &work_->non_finite);
    // Unrolled in full, it would load all of q_local at once and run out of registers.
    POWERSGD_UNROLL_2
    for (int k = 0; k < R; ++k) {
      if (!rows_.has_memory()) break;
      float q[4];
      load_stored<Access::kShared>(panels_.row(k) + Products::column(), q);
      subtract_product(p_ + k * kProjectRows<R> + Products::row() + first, q, m);
    }
    hide_from_optimizer(rows_.cols);
    store_m(rows_, first, col_, columns(), m);
  }

  Rows<kRows, G, M> rows_;
  Work* const work_;
  float* const p_;
  FactorPanels panels_;
  StoredElements<G, M> stored_;
  Products products_;
  int col_ = 0;
  bool active_ = false;
};

}  // namespace powersgd::kernels::cuda
