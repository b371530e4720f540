// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "kernels/cuda/grid.cuh"
#include "kernels/cuda/payload.cuh"

// A tile of a gradient: output_scale * p_hat Q, at a strip of columns and a range of rows.
//
// Every function loads its part of Q, and its first rows of p_hat, before it waits for
// `await_checks`, which says whether the step is skipped. Then no gradient may be overwritten.

namespace powersgd::kernels::cuda {

constexpr int kAnyRank = 0;          // with_rank's R for ranks above 8
constexpr size_t kTicketBytes = 16;  // of shared memory, in front of all else
static_assert(sizeof(Ticket) <= kTicketBytes);

// Rows of p_hat in shared memory at a time, and rows that a warp takes at a time.
constexpr int kStagedRowsLowRank = 256;
constexpr int kRowsAnyRank = 8;
constexpr int kStagedRowsAnyRank = kWarps * kRowsAnyRank;
// Ranks in shared memory at a time, at any rank. p_hat's are transposed, so that a warp finds its
// rows side by side, and spread over the banks.
template <typename F>
constexpr int kStagedRanks = sizeof(F) == 8 ? 16 : 32;
constexpr int kStagedStride = kStagedRowsAnyRank + 4;

// Shared memory has p_hat and, at any rank, a panel of Q.
template <int R, typename G>
constexpr size_t kReconstructBytes =
    sizeof(Factor<G>) *
    (R == kAnyRank ? kStagedRanks<Factor<G>> * (kStagedStride + kStrip) : kStagedRowsLowRank * R);

template <typename F>
__device__ __forceinline__ F* staged_p() {
  return reinterpret_cast<F*>(shared_memory() + kTicketBytes);
}

// The rows of a tile from `begin` on, at most `most` of them.
__device__ __forceinline__ int rows_from(const Tile& tile, int64_t begin, int most) {
  const int64_t left = tile.row_end - begin;
  return left < most ? static_cast<int>(left) : most;
}

// The factor of p_hat in the output.
template <typename F>
__device__ __forceinline__ F scale_of_p(const Bucket& bucket, const Matrix& matrix) {
  return out_of_use<F>(bucket, matrix) ? F{0} : static_cast<F>(bucket.output_scale);
}

// p_hat's rows from `begin` on, as [kStagedRowsLowRank][R] with zeros beyond the rank.
template <int R, typename F>
__device__ __forceinline__ void stage_low_rank(const Bucket& bucket, const Matrix& matrix,
                                               int64_t begin, int rows) {
  const F* const p_hat = global(static_cast<const F*>(matrix.p_hat)) + begin * matrix.rank;
  const F scale = scale_of_p<F>(bucket, matrix);
  for (int i = threadIdx.x; i < rows * R; i += kThreads) {
    const int row = i / R, k = i % R;
    staged_p<F>()[i] = k < matrix.rank ? scale * p_hat[row * matrix.rank + k] : F{0};
  }
}

// A tile at rank <= R, with Q in registers.
template <int R, typename G, typename AwaitChecks>
__device__ __forceinline__ bool reconstruct_low_rank(const Bucket& bucket, const Matrix& matrix,
                                                     const Tile& tile, G* gradient,
                                                     const AwaitChecks& await_checks) {
  using F = Factor<G>;
  const F* const q = q_payload<F>(bucket);
  const int64_t col = tile.col_begin + threadIdx.x % kWarpSize * 4;
  const int count = static_cast<int>(tile.col_end - col);
  const LaneColumns columns{is_aligned(gradient, matrix.cols), count};
  const LaneColumns q_columns{is_aligned(q + matrix.q_offset, matrix.cols), count};
  const bool active = count > 0;
  F factor[R][4];
  POWERSGD_UNROLL
  for (int k = 0; k < R; ++k) {
    POWERSGD_UNROLL
    for (int j = 0; j < 4; ++j) factor[k][j] = 0;
    if (active && k < matrix.rank)
      load_columns<Access::kReuse>(q + matrix.q_offset + k * matrix.cols + col, q_columns,
                                   DType::kFloat32, factor[k]);
  }
  bool waits = true;
  for (int64_t begin = tile.row_begin; begin < tile.row_end; begin += kStagedRowsLowRank) {
    const int rows = rows_from(tile, begin, kStagedRowsLowRank);
    if (!waits) __syncthreads();
    stage_low_rank<R, F>(bucket, matrix, begin, rows);
    if (waits && await_checks()) return true;
    waits = false;
    __syncthreads();
    if (!active) continue;
    for (int row = threadIdx.x / kWarpSize; row < rows; row += kWarps) {
      F sum[4] = {};
      POWERSGD_UNROLL
      for (int k = 0; k < R; ++k) {
        const F p = staged_p<F>()[row * R + k];
        POWERSGD_UNROLL
        for (int j = 0; j < 4; ++j) sum[j] += p * factor[k][j];
      }
      store_columns<Access::kNonTemporal>(gradient + (begin + row) * matrix.cols + col, columns,
                                          bucket.gradient_dtype, sum);
    }
  }
  return waits ? await_checks() : false;
}

// Ranks [k0, k0 + kStagedRanks<F>) of p_hat and Q in shared memory, padded with zeros.
template <typename F>
__device__ __forceinline__ void stage_ranks(const Bucket& bucket, const Matrix& matrix,
                                            const Tile& tile, int64_t begin, int64_t k0,
                                            bool stage_q, F* staged_q) {
  constexpr int kRanks = kStagedRanks<F>;
  F* const staged = staged_p<F>();  // [kRanks][kStagedStride]
  const F* const p_hat = global(static_cast<const F*>(matrix.p_hat));
  const F scale = scale_of_p<F>(bucket, matrix);
  const int rows = rows_from(tile, begin, kStagedRowsAnyRank);
  for (int i = threadIdx.x; i < kStagedRowsAnyRank * kRanks; i += kThreads) {
    const int row = i / kRanks, k = i % kRanks;
    const bool exists = row < rows && k0 + k < matrix.rank;
    staged[k * kStagedStride + row] =
        exists ? scale * p_hat[(begin + row) * matrix.rank + k0 + k] : F{0};
  }
  if (!stage_q) return;
  const F* const q = q_payload<F>(bucket);
  for (int i = threadIdx.x; i < kRanks * kStrip; i += kThreads) {
    const int64_t k = k0 + i / kStrip, col = tile.col_begin + i % kStrip;
    const bool exists = k < matrix.rank && col < tile.col_end;
    staged_q[i] = exists ? q[matrix.q_offset + k * matrix.cols + col] : F{0};
  }
}

// A tile at any rank, with the sums of eight rows in registers. The rank is taken in parts. Q is
// staged again only if it has several.
template <typename G, typename AwaitChecks>
__device__ __forceinline__ bool reconstruct_any_rank(const Bucket& bucket, const Matrix& matrix,
                                                     const Tile& tile, G* gradient,
                                                     const AwaitChecks& await_checks) {
  using F = Factor<G>;
  constexpr int kRanks = kStagedRanks<F>;
  F* const staged = staged_p<F>();
  F* const staged_q = staged + kRanks * kStagedStride;  // [kRanks][kStrip]
  const int first = threadIdx.x / kWarpSize * kRowsAnyRank;
  const int lane_col = static_cast<int>(threadIdx.x) % kWarpSize * 4;
  const int64_t col = tile.col_begin + lane_col;
  const LaneColumns columns{is_aligned(gradient, matrix.cols),
                            static_cast<int>(tile.col_end - col)};
  bool waits = true;
  for (int64_t begin = tile.row_begin; begin < tile.row_end; begin += kStagedRowsAnyRank) {
    const int rows = rows_from(tile, begin, kStagedRowsAnyRank);
    F sum[kRowsAnyRank][4] = {};
    for (int64_t k0 = 0; k0 < matrix.rank; k0 += kRanks) {
      __syncthreads();
      stage_ranks(bucket, matrix, tile, begin, k0, begin == tile.row_begin || matrix.rank > kRanks,
                  staged_q);
      if (waits && await_checks()) return true;
      waits = false;
      __syncthreads();
      if (col >= tile.col_end || first >= rows) continue;
      const int64_t left = matrix.rank - k0;
      const int ranks = left < kRanks ? static_cast<int>(left) : kRanks;
      POWERSGD_UNROLL_2
      for (int k = 0; k < ranks; ++k) {
        F factor[4];
        load_stored<Access::kShared>(staged_q + k * kStrip + lane_col, factor);
        POWERSGD_UNROLL
        for (int i = 0; i < kRowsAnyRank; ++i) {
          const F p = staged[k * kStagedStride + first + i];
          POWERSGD_UNROLL
          for (int j = 0; j < 4; ++j) sum[i][j] += p * factor[j];
        }
      }
    }
    if (col >= tile.col_end) continue;
    POWERSGD_UNROLL
    for (int i = 0; i < kRowsAnyRank; ++i) {
      if (first + i < rows)
        store_columns<Access::kNonTemporal>(gradient + (begin + first + i) * matrix.cols + col,
                                            columns, bucket.gradient_dtype, sum[i]);
    }
  }
  return waits ? await_checks() : false;
}

// Returns true, and has written nothing, if the step is skipped. All threads of the block call it.
template <int R, typename G, typename AwaitChecks>
__device__ __forceinline__ bool reconstruct_tile(const Bucket& bucket, const Matrix& matrix,
                                                 const Tile& tile,
                                                 const AwaitChecks& await_checks) {
  G* const gradient = static_cast<G*>(bucket.gradient) + matrix.gradient_offset;
  if constexpr (R == kAnyRank)
    return reconstruct_any_rank(bucket, matrix, tile, gradient, await_checks);
  else
    return reconstruct_low_rank<R>(bucket, matrix, tile, gradient, await_checks);
}

}  // namespace powersgd::kernels::cuda
