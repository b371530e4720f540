// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "kernels/cuda/stored_m.cuh"
#include "kernels/cuda/tensor_cores.cuh"
#include "kernels/cuda/work.cuh"

// A tile of back_project on tensor cores, for ranks 9 to 32: A is p_hat^T, B is M and C is q, and
// the operands are rounded to bfloat16.
//
// A warp takes 32 of the strip's columns. Two groups of four warps take the rows in turn, and their
// sums are added at the end. A lane has the rows 4t to 4t + 3 of each 16, which are inner indices,
// and the columns 4g to 4g + 3 of its warp. Column 4n + i is column n of the i-th B.

namespace powersgd::kernels::cuda {

// p_hat lies in shared memory as [R][kPairStride] pairs of rows. Four ranks are 8 banks apart.
constexpr int kPairStride = kStagedRows / 2 + 8;
constexpr int kRowGroups = 2;
template <int R>
constexpr size_t kBfloat16BytesOfBackProject =
    sizeof(Work) + 4 * std::max(R * kPairStride, kRowGroups* R* kStrip);

template <int R, typename S>
class BackProjectInBfloat16 {
 public:
  __device__ BackProjectInBfloat16(const Bucket& bucket, const Matrix& matrix, const Tile& tile)
      : matrix_(matrix),
        tile_(tile),
        m_(bucket, matrix),
        shared_(shared_memory() + sizeof(Work)),
        columns_{is_aligned(m_.base, matrix.cols),
                 static_cast<int>(tile.col_end - tile.col_begin) - column()},
        whole_(columns_.aligned && tile.col_end - tile.col_begin == kStrip &&
               (tile.row_end - tile.row_begin) % (kRowGroups * kRows) == 0) {}

  // Loads the lane's first part of M.
  __device__ __forceinline__ void load_first() {
    const int rows = rows_of_chunk(tile_, tile_.row_begin);
    whole_ ? load<true>(tile_.row_begin, rows, first_row())
           : load<false>(tile_.row_begin, rows, first_row());
  }

  // Adds up q. `load_first` was called.
  __device__ __forceinline__ void run() { whole_ ? add_up<true>() : add_up<false>(); }

  // Adds the sums of the groups, and writes q.
  template <typename Write>
  __device__ __forceinline__ void finish(const Write& write) {
    float* const sums = reinterpret_cast<float*>(shared_);  // [kRowGroups][R][kStrip]
    __syncthreads();
    POWERSGD_UNROLL
    for (int a = 0; a < R / 16; ++a) {
      POWERSGD_UNROLL
      for (int i = 0; i < 16; ++i) {
        const int c = i % 4, k = 16 * a + lane_group() + c / 2 * 8;
        const int col = warp_column() + 4 * (2 * lane_in_group() + c % 2) + i / 4;
        sums[(group() * R + k) * kStrip + col] = sums_[a][i / 4][c];
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < R * kStrip; i += kThreads)
      write(i / kStrip, i % kStrip, sums[i] + sums[R * kStrip + i]);
  }

 private:
  static constexpr int kSteps = 2;  // times kInner rows that a lane loads at a time
  static constexpr int kRows = kSteps * kInner;

  __device__ static int group() { return warp_id() / 4; }
  __device__ static int first_row() { return group() * kRows; }
  __device__ static int warp_column() { return warp_id() % 4 * kWarpSize; }
  __device__ static int column() { return warp_column() + 4 * lane_group(); }

  template <bool kWhole>
  __device__ __forceinline__ void add_up() {
    bool loaded = true;
    for (int64_t begin = tile_.row_begin; begin < tile_.row_end; begin += kStagedRows) {
      const int rows = rows_of_chunk(tile_, begin);
      __syncthreads();
      stage_p(begin, rows);
      __syncthreads();
      POWERSGD_NO_UNROLL
      for (int row = first_row(); row < rows; row += kRowGroups * kRows) {
        if (!loaded) load<kWhole>(begin, rows, row);
        loaded = false;
        POWERSGD_UNROLL
        for (int step = 0; step < kSteps; ++step) multiply(step, row + step * kInner);
      }
      loaded = false;
    }
  }

  // Loads rows [row, row + kRows) of a chunk. A row beyond the last repeats it; its factors in
  // shared memory are 0. A whole tile has them all, and vector accesses reach them.
  template <bool kWhole>
  __device__ __forceinline__ void load(int64_t begin, int rows, int row) {
    const S* const chunk = m_.base + begin * matrix_.cols + tile_.col_begin + column();
    POWERSGD_UNROLL
    for (int i = 0; i < kSteps * 4; ++i) {
      const int wanted = row + i / 4 * kInner + 4 * lane_in_group() + i % 4;
      if constexpr (kWhole) {
        load_stored<Access::kNonTemporal>(chunk + wanted * matrix_.cols, stored_[i]);
      } else {
        POWERSGD_UNROLL
        for (int j = 0; j < 4; ++j) stored_[i][j] = 0;
        if (columns_.count > 0 && rows > 0)
          load_stored<Access::kNonTemporal>(
              chunk + (wanted < rows ? wanted : rows - 1) * matrix_.cols, columns_, stored_[i]);
      }
    }
  }

  // p_hat's rows from `begin` on, padded with zeros. A warp takes 4 ranks of 8 pairs of rows.
  __device__ __forceinline__ void stage_p(int64_t begin, int rows) {
    uint32_t* const staged = reinterpret_cast<uint32_t*>(shared_);
    const float* const p_hat =
        global(static_cast<const float*>(matrix_.p_hat)) + begin * matrix_.rank;
    const int rank = static_cast<int>(matrix_.rank);
    for (int i = threadIdx.x; i < R * kStagedRows / 2; i += kThreads) {
      const int k = i % 4 + i / kWarpSize % (R / 4) * 4;
      const int pair = i / 4 % 8 + i / (8 * R) * 8;
      const auto at = [&](int row) { return k < rank && row < rows ? p_hat[row * rank + k] : 0; };
      staged[k * kPairStride + pair] = pack_bfloat16(at(2 * pair), at(2 * pair + 1));
    }
  }

  // Adds the products of kInner loaded rows, whose factors begin at row `row` of those staged.
  __device__ __forceinline__ void multiply(int step, int row) {
    float m[4][4];
    with_dtype<S>(m_.dtype, [&](DType dtype) {
      POWERSGD_UNROLL
      for (int i = 0; i < 4; ++i) widen_columns(stored_[4 * step + i], dtype, m[i]);
    });
    POWERSGD_UNROLL
    for (int i = 0; i < 4; ++i) keep_finite(m[i], m_.is_gradient);
    FragmentB right[4];
    POWERSGD_UNROLL
    for (int i = 0; i < 8; ++i)
      right[i / 2][i % 2] = pack_bfloat16(m[i % 2 * 2][i / 2], m[i % 2 * 2 + 1][i / 2]);
    const uint32_t* const p = reinterpret_cast<const uint32_t*>(shared_) +
                              lane_group() * kPairStride + row / 2 + 2 * lane_in_group();
    POWERSGD_UNROLL
    for (int a = 0; a < R / 16; ++a) {
      const uint32_t* const upper = p + 16 * a * kPairStride;
      const uint32_t* const lower = upper + 8 * kPairStride;
      const FragmentA left = {upper[0], lower[0], upper[1], lower[1]};
      POWERSGD_UNROLL
      for (int i = 0; i < 4; ++i) mma(sums_[a][i], left, right[i]);
    }
  }

  const Matrix& matrix_;
  const Tile& tile_;
  const StoredM<S> m_;
  unsigned char* const shared_;
  const LaneColumns columns_;
  const bool whole_;
  S stored_[kSteps * 4][4];
  FragmentC sums_[R / 16][4] = {};
};

template <int R, typename S>
__device__ __forceinline__ void back_project_bfloat16_tile(const Bucket& bucket,
                                                           const Matrix& matrix, const Tile& tile) {
  BackProjectInBfloat16<R, S> products(bucket, matrix, tile);
  products.load_first();
  if (sends_zeros(bucket, matrix)) {
    send_zeros(bucket, matrix, tile);
    return;
  }
  products.run();
  products.finish(strip_writer(bucket, matrix, tile));
  add_row_ranges(bucket, matrix, tile);
}

}  // namespace powersgd::kernels::cuda
