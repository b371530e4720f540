// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "kernels/cuda/stored_m.cuh"
#include "kernels/cuda/tensor_cores.cuh"
#include "kernels/cuda/work.cuh"

// A tile of back_project on tensor cores, for ranks 9 to 32: A is p_hat^T, B is M and C is q.
//
// A warp takes 32 of the strip's columns. Two groups of four warps take the rows in turn, and their
// sums are added at the end. In the order of its fragments a lane has
//   - columns 4n + i of the warp as column n of the i-th B, so that it loads four at a time;
//   - ranks 2m and 2m + 1 of each 16 as rows m and m + 8 of A, so that it loads two at a time.

namespace powersgd::kernels::cuda {

template <int R>
constexpr int kStagedTensorStride = R + 8;  // spreads p_hat's rows over the banks
template <int R>
constexpr size_t kTensorBytesOfBackProject =
    sizeof(Work) + sizeof(float) * kStagedRows * kStagedTensorStride<R>;

// Registers are traded for blocks in flight.
template <int R>
constexpr int kTensorBlocksOfBackProject = R <= 16 ? 2 : 1;

template <int R, typename S>
class BackProjectOnTensorCores {
 public:
  __device__ BackProjectOnTensorCores(const Bucket& bucket, const Matrix& matrix, const Tile& tile)
      : matrix_(matrix),
        tile_(tile),
        m_(bucket, matrix),
        staged_(reinterpret_cast<float*>(shared_memory() + sizeof(Work))),
        columns_{is_aligned(m_.base, matrix.cols),
                 static_cast<int>(tile.col_end - tile.col_begin) - column(lane_group(), 0)},
        active_(tile.col_end - tile.col_begin > warp_column()) {}

  // Loads the lane's first part of M.
  __device__ __forceinline__ void load_first() {
    load(tile_.row_begin, rows_of_chunk(tile_, tile_.row_begin), first_row());
  }

  // Adds up q. `load_first` was called.
  __device__ __forceinline__ void run() {
    bool loaded = true;
    for (int64_t begin = tile_.row_begin; begin < tile_.row_end; begin += kStagedRows) {
      const int rows = rows_of_chunk(tile_, begin);
      __syncthreads();
      stage_p(begin, rows);
      __syncthreads();
      if (!active_) continue;
      POWERSGD_NO_UNROLL
      for (int row = first_row(); row < rows; row += kGroups * kRows) {
        if (!loaded) load(begin, rows, row);
        loaded = false;
        POWERSGD_UNROLL
        for (int step = 0; step < kSteps; ++step) multiply(step, row + step * kInner);
      }
      loaded = false;
    }
  }

  // Adds the sums of the groups, and writes q.
  template <typename Write>
  __device__ __forceinline__ void finish(const Write& write) {
    static_assert(kGroups * kStrip <= kStagedRows);
    __syncthreads();
    float* const shared = staged_;  // [kGroups][R][kStrip]
    POWERSGD_UNROLL
    for (int a = 0; a < kRankTiles; ++a) {
      POWERSGD_UNROLL
      for (int i = 0; i < kColumnTiles; ++i) {
        POWERSGD_UNROLL
        for (int c = 0; c < 4; ++c) {
          const int k = 16 * a + 2 * lane_group() + c / 2;
          const int col = column(2 * lane_in_group() + c % 2, i);
          shared[(group() * R + k) * kStrip + col] = sums_[a][i][c];
        }
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < R * kStrip; i += kThreads)
      write(i / kStrip, i % kStrip, shared[i] + shared[R * kStrip + i]);
  }

 private:
  static constexpr int kGroups = 2;  // of warps
  // A lane loads so many times kInner rows at a time: 32 KB per multiprocessor.
  static constexpr int kSteps = 4 / kTensorBlocksOfBackProject<R>;
  static constexpr int kRows = kSteps * kInner;
  static constexpr int kColumnTiles = 4;  // a lane's adjacent columns
  static constexpr int kRankTiles = R / 16;

  __device__ static int warp() { return static_cast<int>(threadIdx.x) / kWarpSize; }
  __device__ static int group() { return warp() / 4; }
  __device__ static int first_row() { return group() * kRows; }
  __device__ static int warp_column() { return warp() % 4 * kWarpSize; }
  // The strip's column that is column n of the i-th B.
  __device__ static int column(int n, int i) { return warp_column() + 4 * n + i; }

  // Loads rows [row, row + kRows) of a chunk. A row beyond the last repeats it; its factors in
  // shared memory are 0.
  __device__ __forceinline__ void load(int64_t begin, int rows, int row) {
    const S* const chunk =
        m_.base + begin * matrix_.cols + tile_.col_begin + column(lane_group(), 0);
    POWERSGD_UNROLL
    for (int i = 0; i < kSteps * 2; ++i) {
      const int wanted = row + i * 4 + lane_in_group();
      POWERSGD_UNROLL
      for (int j = 0; j < 4; ++j) stored_[i][j] = 0;
      if (columns_.count > 0 && rows > 0)
        load_stored<Access::kNonTemporal>(
            chunk + (wanted < rows ? wanted : rows - 1) * matrix_.cols, columns_, stored_[i]);
    }
  }

  // p_hat's rows from `begin` on, padded with zeros.
  __device__ __forceinline__ void stage_p(int64_t begin, int rows) {
    const float* const p_hat = static_cast<const float*>(matrix_.p_hat);
    for (int i = threadIdx.x; i < kStagedRows * R; i += kThreads) {
      const int row = i / R, k = i % R;
      staged_[row * kStagedTensorStride<R> + k] =
          row < rows && k < matrix_.rank ? p_hat[(begin + row) * matrix_.rank + k] : 0;
    }
  }

  // Adds the products of kInner loaded rows, whose factors begin at row `row` of those staged.
  __device__ __forceinline__ void multiply(int step, int row) {
    FragmentB b[kColumnTiles];
    POWERSGD_UNROLL
    for (int half = 0; half < 2; ++half) {
      float values[4];
      widen_columns(stored_[2 * step + half], m_.dtype, values);
      keep_finite(values, m_.is_gradient);
      POWERSGD_UNROLL
      for (int i = 0; i < kColumnTiles; ++i) b[i].set(half, values[i]);
    }
    POWERSGD_UNROLL
    for (int tile = 0; tile < kRankTiles; ++tile) {
      FragmentA a;
      POWERSGD_UNROLL
      for (int half = 0; half < 2; ++half) {
        const float2 p = *reinterpret_cast<const float2*>(
            staged_ + (row + lane_in_group() + 4 * half) * kStagedTensorStride<R> + 16 * tile +
            2 * lane_group());
        a.set(2 * half, p.x);
        a.set(2 * half + 1, p.y);
      }
      POWERSGD_UNROLL
      for (int i = 0; i < kColumnTiles; ++i) multiply_add(sums_[tile][i], a, b[i]);
    }
  }

  const Matrix& matrix_;
  const Tile& tile_;
  const StoredM<S> m_;
  float* const staged_;  // [kStagedRows][kStagedTensorStride]
  const LaneColumns columns_;
  const bool active_;
  S stored_[kSteps * 2][4];
  FragmentC sums_[kRankTiles][kColumnTiles] = {};
};

template <int R, typename S>
__device__ __forceinline__ void back_project_tensor_tile(const Bucket& bucket, const Matrix& matrix,
                                                         const Tile& tile) {
  BackProjectOnTensorCores<R, S> tensor(bucket, matrix, tile);
  tensor.load_first();
  if (sends_zeros(bucket, matrix)) {
    send_zeros<float>(bucket, matrix, tile);
    return;
  }
  tensor.run();
  tensor.finish(strip_writer<float>(bucket, matrix, tile));
  add_row_ranges<float>(bucket, matrix, tile);
}

}  // namespace powersgd::kernels::cuda
