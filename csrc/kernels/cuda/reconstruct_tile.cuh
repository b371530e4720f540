// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "kernels/cuda/reconstruct_high_rank.cuh"
#include "kernels/cuda/reconstruct_staging.cuh"

// A tile of a gradient: output_scale * p_hat Q, at a strip of columns and a range of rows.
//
// Every function loads its part of Q, and its first rows of p_hat, before it waits for
// `await_checks`, which says whether the step is skipped. Then no gradient may be overwritten.

namespace powersgd::kernels::cuda {

// p_hat's rows from `begin` on, as [kStagedRows<R>][R] with zeros beyond the rank.
template <int R>
__device__ __forceinline__ void stage_low_rank(const Bucket& bucket, const Matrix& matrix,
                                               int64_t begin, int rows) {
  const float* const p_hat = global(static_cast<const float*>(matrix.p_hat)) + begin * matrix.rank;
  const float scale = scale_of_p(bucket, matrix);
  for (int i = threadIdx.x; i < rows * R; i += kThreads) {
    const int row = i / R, k = i % R;
    staged_p()[i] = k < matrix.rank ? scale * p_hat[row * matrix.rank + k] : 0.0f;
  }
}

// A tile at rank <= R, with Q in registers.
template <int R, typename G, typename AwaitChecks>
__device__ __forceinline__ bool reconstruct_low_rank(const Bucket& bucket, const Matrix& matrix,
                                                     const Tile& tile, G* gradient,
                                                     const AwaitChecks& await_checks) {
  const float* const q = q_payload(bucket);
  const StripColumns lane(gradient, matrix, tile);
  const LaneColumns q_columns = lane.of(q + matrix.q_offset, matrix);
  const bool active = lane.columns.count > 0;
  float factor[R][4];
  POWERSGD_UNROLL
  for (int k = 0; k < R; ++k) {
    POWERSGD_UNROLL
    for (int j = 0; j < 4; ++j) factor[k][j] = 0;
    if (active && k < matrix.rank)
      load_columns<Access::kReuse>(q + matrix.q_offset + k * matrix.cols + lane.first, q_columns,
                                   DType::kFloat32, factor[k]);
  }
  bool waits = true;
  for (int64_t begin = tile.row_begin; begin < tile.row_end; begin += kStagedRows<R>) {
    const int rows = rows_from(tile, begin, kStagedRows<R>);
    if (!waits) __syncthreads();
    stage_low_rank<R>(bucket, matrix, begin, rows);
    if (waits && await_checks()) return true;
    waits = false;
    __syncthreads();
    if (!active) continue;
    for (int row = threadIdx.x / kWarpSize; row < rows; row += kWarps) {
      float sum[4] = {};
      POWERSGD_UNROLL
      for (int k = 0; k < R; ++k) {
        const float p = staged_p()[row * R + k];
        POWERSGD_UNROLL
        for (int j = 0; j < 4; ++j) sum[j] += p * factor[k][j];
      }
      store_columns<Access::kNonTemporal>(gradient + (begin + row) * matrix.cols + lane.first,
                                          lane.columns, bucket.gradient_dtype, sum);
    }
  }
  return waits ? await_checks() : false;
}

// Zeros, to which the caller adds the product.
template <typename G, typename AwaitChecks>
__device__ __forceinline__ bool reconstruct_zeros(const Matrix& matrix, const Tile& tile,
                                                  G* gradient, const AwaitChecks& await_checks) {
  if (await_checks()) return true;
  for (int64_t row = tile.row_begin + warp_id(); row < tile.row_end; row += kWarps) {
    for (int64_t col = tile.col_begin + lane_id(); col < tile.col_end; col += kWarpSize)
      gradient[row * matrix.cols + col] = 0;
  }
  return false;
}

// Returns true, and has written nothing, if the step is skipped. All threads of the block call it.
template <int R, typename G, typename AwaitChecks>
__device__ __forceinline__ bool reconstruct_tile(const Bucket& bucket, const Matrix& matrix,
                                                 const Tile& tile,
                                                 const AwaitChecks& await_checks) {
  G* const gradient = static_cast<G*>(bucket.gradient) + matrix.gradient_offset;
  if constexpr (R == kNoProducts)
    return reconstruct_zeros(matrix, tile, gradient, await_checks);
  else if constexpr (kIsLowRank<R>)
    return reconstruct_low_rank<R>(bucket, matrix, tile, gradient, await_checks);
  else
    return reconstruct_high_rank<R>(bucket, matrix, tile, gradient, await_checks);
}

}  // namespace powersgd::kernels::cuda
