// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "kernels/cuda/reconstruct_tile.cuh"
#include "kernels/cuda/tensor_cores.cuh"

// A tile of a gradient on tensor cores, for ranks 9 to 32: A is output_scale * p_hat, B is Q.
//
// A warp holds 32 columns of Q in registers, or 16 above rank 16. The groups of warps that cover a
// strip take 16 rows in turn. In the order of its fragments a lane has
//   - columns 2n + b of each 16 as column n of the b-th B, so that it stores four at a time;
//   - two adjacent ranks of each 8 as its inner indices, so that it loads two at a time.

namespace powersgd::kernels::cuda {

constexpr int kStagedRowsTensor = 128;
template <int R>
constexpr int kStagedStrideTensor = R + 8;  // spreads p_hat's rows over the banks
template <int R>
constexpr size_t kTensorBytesOfReconstruct =
    sizeof(float) * kStagedRowsTensor * kStagedStrideTensor<R>;

template <int R, typename G>
class ReconstructOnTensorCores {
 public:
  __device__ ReconstructOnTensorCores(const Bucket& bucket, const Matrix& matrix, const Tile& tile)
      : matrix_(matrix),
        tile_(tile),
        dtype_(bucket.gradient_dtype),
        gradient_(static_cast<G*>(bucket.gradient) + matrix.gradient_offset + tile.col_begin),
        aligned_(is_aligned(gradient_, matrix.cols)),
        width_(static_cast<int>(tile.col_end - tile.col_begin)) {}

  // The warp's columns of Q, padded with zeros.
  __device__ __forceinline__ void load_q(const float* q) {
    POWERSGD_UNROLL
    for (int k = 0; k < R / kInner; ++k) {
      POWERSGD_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int64_t rank = kInner * k + 2 * lane_in_group() + half;
        POWERSGD_UNROLL
        for (int i = 0; i < kColumnTiles; ++i) {
          const int col = warp_column() + 16 * (i / 2) + 2 * lane_group() + i % 2;
          const bool exists = rank < matrix_.rank && col < width_;
          q_[k][i].set(
              half, exists ? q[matrix_.q_offset + rank * matrix_.cols + tile_.col_begin + col] : 0);
        }
      }
    }
  }

  __device__ __forceinline__ void run(float scale) {
    for (int64_t begin = tile_.row_begin; begin < tile_.row_end; begin += kStagedRowsTensor) {
      const int rows = rows_from(tile_, begin, kStagedRowsTensor);
      __syncthreads();
      stage_p(begin, rows, scale);
      __syncthreads();
      if (warp_column() >= width_) continue;
      POWERSGD_NO_UNROLL
      for (int row = warp() / kGroupWarps * 16; row < rows; row += kGroups * 16)
        multiply(begin, rows, row);
    }
  }

 private:
  static constexpr int kColumnTiles = R <= 16 ? 4 : 2;
  static constexpr int kWarpColumns = 8 * kColumnTiles;
  static constexpr int kGroupWarps = kStrip / kWarpColumns;
  static constexpr int kGroups = kWarps / kGroupWarps;

  __device__ static int warp() { return static_cast<int>(threadIdx.x) / kWarpSize; }
  __device__ static int warp_column() { return warp() % kGroupWarps * kWarpColumns; }
  __device__ static float* staged() { return staged_p<float>(); }  // [kStagedRowsTensor][stride]

  // p_hat's rows from `begin` on, padded with zeros.
  __device__ __forceinline__ void stage_p(int64_t begin, int rows, float scale) {
    const float* const p_hat = global(static_cast<const float*>(matrix_.p_hat));
    for (int i = threadIdx.x; i < kStagedRowsTensor * R; i += kThreads) {
      const int row = i / R, k = i % R;
      staged()[row * kStagedStrideTensor<R> + k] =
          row < rows && k < matrix_.rank ? scale * p_hat[(begin + row) * matrix_.rank + k] : 0;
    }
  }

  // Writes 16 rows, from row `row` of those staged on.
  __device__ __forceinline__ void multiply(int64_t begin, int rows, int row) {
    FragmentC sums[kColumnTiles] = {};
    POWERSGD_UNROLL
    for (int k = 0; k < R / kInner; ++k) {
      FragmentA a;
      POWERSGD_UNROLL
      for (int lower = 0; lower < 2; ++lower) {
        const float2 p = *reinterpret_cast<const float2*>(
            staged() + (row + lane_group() + 8 * lower) * kStagedStrideTensor<R> + kInner * k +
            2 * lane_in_group());
        a.set(lower, p.x);
        a.set(lower + 2, p.y);
      }
      POWERSGD_UNROLL
      for (int i = 0; i < kColumnTiles; ++i) multiply_add(sums[i], a, q_[k][i]);
    }
    store(begin, rows, row, sums);
  }

  __device__ __forceinline__ void store(int64_t begin, int rows, int row,
                                        const FragmentC (&sums)[kColumnTiles]) {
    POWERSGD_UNROLL
    for (int pair = 0; pair < kColumnTiles; pair += 2) {
      const int col = warp_column() + 8 * pair + 4 * lane_in_group();
      const LaneColumns columns{aligned_, width_ - col};
      POWERSGD_UNROLL
      for (int lower = 0; lower < 2; ++lower) {
        const int to_row = row + lane_group() + 8 * lower;
        if (to_row >= rows || col >= width_) continue;
        float values[4];
        POWERSGD_UNROLL
        for (int j = 0; j < 4; ++j) values[j] = sums[pair + j % 2][2 * lower + j / 2];
        store_columns<Access::kNonTemporal>(gradient_ + (begin + to_row) * matrix_.cols + col,
                                            columns, dtype_, values);
      }
    }
  }

  const Matrix& matrix_;
  const Tile& tile_;
  const DType dtype_;
  G* const gradient_;
  const bool aligned_;
  const int width_;
  FragmentB q_[R / kInner][kColumnTiles];
};

// As reconstruct_tile.
template <int R, typename G, typename AwaitChecks>
__device__ __forceinline__ bool reconstruct_tensor_tile(const Bucket& bucket, const Matrix& matrix,
                                                        const Tile& tile,
                                                        const AwaitChecks& await_checks) {
  ReconstructOnTensorCores<R, G> tensor(bucket, matrix, tile);
  tensor.load_q(q_payload<float>(bucket));
  if (await_checks()) return true;
  tensor.run(scale_of_p<float>(bucket, matrix));
  return false;
}

}  // namespace powersgd::kernels::cuda
