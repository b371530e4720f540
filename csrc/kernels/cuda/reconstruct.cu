// SPDX-License-Identifier: BSD-3-Clause
//
// reconstruct: G = output_scale * p_hat Q, and q_warm = the rows of Q at unit norm.
//
// 1. A first kernel looks for non-finite elements of Q and says whether the step is skipped, which must be
//    known before any gradient is overwritten.
// 2. A second kernel's blocks each take one of three kinds of tiles:
//    - A row of Q: the block computes its norm in double, then the row of q_warm.
//    - A strip of 128 columns by a range of rows of a gradient. The block copies p_hat's rows to
//      shared memory. Up to rank 8 a lane holds four columns of Q in registers. Above, it loads
//      them again for every eight rows.
//    - A part of a raw segment.
//    If the step is skipped, the gradients become NaN, and memory and the factors are as before.
#include "kernels/cuda/dispatch.cuh"
#include "kernels/cuda/elements.cuh"
#include "kernels/cuda/reduce.cuh"
#include "kernels/shared/steps.h"

namespace powersgd::kernels::cuda {
namespace {

constexpr int kAnyRank = 0;      // with_rank's R for ranks above 8
constexpr int kRowsAnyRank = 8;  // that a warp takes at a time

// Rows and columns of p_hat in shared memory at a time. At any rank they are transposed, so that a
// warp finds its rows side by side, and spread over the banks.
template <int R>
constexpr int kStagedRows = R == kAnyRank ? kWarps * kRowsAnyRank : 256;
template <int R>
constexpr int kStagedRanks = R == kAnyRank ? 32 : R;
constexpr int kStagedStride = kStagedRows<kAnyRank> + 4;
template <int R, typename F>
constexpr size_t kStagedBytes =
    sizeof(F) * kStagedRanks<R> * (R == kAnyRank ? kStagedStride : kStagedRows<R>);

template <typename F>
__global__ void __launch_bounds__(kThreads) check_kernel(Bucket bucket, int64_t first_tile) {
  begin_kernel();
  const Tile tile = bucket.tiles[first_tile + blockIdx.x];
  const Matrix matrix = bucket.matrices[tile.item];
  const F* q = elements<F>(bucket.q_payload, matrix.q_offset);
  bool bad = false;
  for (int64_t i = threadIdx.x; i < matrix.rank * kStrip; i += kThreads) {
    const int64_t col = tile.col_begin + i % kStrip;
    if (col < tile.col_end) bad = bad || !is_finite(q[i / kStrip * matrix.cols + col]);
  }
  if (__syncthreads_or(bad) && threadIdx.x == 0) atomicOr(&bucket.state->skipped, 1);
}

// Nothing that was sent counts, and memory alone is the residual.
template <typename F>
__device__ void clear_row(const Matrix& matrix, int64_t k) {
  F* const q_local = static_cast<F*>(matrix.q_local) + k * matrix.cols;
  for (int64_t col = threadIdx.x; col < matrix.cols; col += kThreads) q_local[col] = 0;
}

// One row of Q. A zero row, and a row of a skipped step, keeps what q_warm holds.
template <typename F>
__device__ void update_factor_row(const Bucket& bucket, const Matrix& matrix, int64_t k,
                                  bool skip) {
  const F* q = elements<F>(bucket.q_payload, matrix.q_offset) + k * matrix.cols;
  if (skip || out_of_use<F>(bucket, matrix)) {
    clear_row<F>(matrix, k);
    return;
  }
  F* q_warm = static_cast<F*>(matrix.q_warm) + k * matrix.cols;
  double squares = 0;
  for (int64_t col = threadIdx.x; col < matrix.cols; col += kThreads) {
    const double value = q[col];
    squares += value * value;
  }
  double* const partial = reinterpret_cast<double*>(shared_memory());
  squares = warp_sum(squares);
  if (threadIdx.x % kWarpSize == 0) partial[threadIdx.x / kWarpSize] = squares;
  __syncthreads();
  double sum = 0;
  for (int w = 0; w < kWarps; ++w) sum += partial[w];
  if (!(sum > 0)) return;
  const double scale = 1 / sqrt(sum);
  for (int64_t col = threadIdx.x; col < matrix.cols; col += kThreads)
    q_warm[col] = static_cast<F>(q[col] * scale);
}

template <typename F>
__device__ void unpack_raw(const Bucket& bucket, const Tile& tile, bool skip) {
  const RawSegment segment = bucket.raw_segments[tile.item];
  const F* from = static_cast<const F*>(bucket.p_payload) + segment.p_offset;
  const F scale = static_cast<F>(bucket.output_scale);
  for (int64_t i = tile.col_begin + threadIdx.x; i < tile.col_end; i += kThreads)
    store_any(bucket.gradient, segment.gradient_offset + i, skip ? NAN : scale * from[i],
              bucket.gradient_dtype);
}

// memory = M - G and G = NaN, as the step is skipped.
template <typename F>
__device__ void skip_tile(const Bucket& bucket, const Matrix& matrix, const Tile& tile) {
  const int64_t width = tile.col_end - tile.col_begin;
  for (int64_t i = threadIdx.x; i < (tile.row_end - tile.row_begin) * width; i += kThreads) {
    const int64_t index = (tile.row_begin + i / width) * matrix.cols + tile.col_begin + i % width;
    const F g = static_cast<F>(
        load_any(bucket.gradient, matrix.gradient_offset + index, bucket.gradient_dtype));
    if (matrix.memory != nullptr && is_finite(g)) {
      const F m = static_cast<F>(load_any(matrix.memory, index, bucket.residual_dtype));
      store_any(matrix.memory, index, m - g, bucket.residual_dtype);
    }
    store_any(bucket.gradient, matrix.gradient_offset + index, NAN, bucket.gradient_dtype);
  }
}

// Rows [begin, begin + rows) of p_hat from column k0 on, scaled and padded with zero columns, as
// [kStagedRows][R], or as [kStagedRanks][kStagedStride] at any rank.
template <int R, typename F>
__device__ __forceinline__ void stage_p(const Bucket& bucket, const Matrix& matrix, int64_t begin,
                                        int rows, int64_t k0, F* staged) {
  constexpr int kWidth = kStagedRanks<R>;
  const F* p_hat = global(static_cast<const F*>(matrix.p_hat)) + begin * matrix.rank + k0;
  const F scale = out_of_use<F>(bucket, matrix) ? F{0} : static_cast<F>(bucket.output_scale);
  for (int i = threadIdx.x; i < rows * kWidth; i += kThreads) {
    const int row = i / kWidth, k = i % kWidth;
    const F p = k0 + k < matrix.rank ? scale * p_hat[row * matrix.rank + k] : F{0};
    staged[R == kAnyRank ? k * kStagedStride + row : i] = p;
  }
}

// Loads W columns of Q. The gradient's rows may be aligned where those of Q are not, after a matrix
// of odd width.
template <int W, typename F>
__device__ __forceinline__ void load_q(const F* address, bool aligned, F (&out)[W]) {
  if (aligned) {
    load_columns<Access::kReuse>(address, DType::kFloat32, out);
  } else {
    POWERSGD_UNROLL
    for (int j = 0; j < W; ++j) out[j] = address[j];
  }
}

// A tile at rank <= R, with Q in registers.
template <int R, int W, typename G>
__device__ __forceinline__ void reconstruct_low_rank(const Bucket& bucket, const Matrix& matrix,
                                                     const Tile& tile, int64_t begin_col,
                                                     G* gradient) {
  using F = Factor<G>;
  F* const staged = reinterpret_cast<F*>(shared_memory());  // [kStagedRows][R]
  const F* const q = global(elements<F>(bucket.q_payload, matrix.q_offset));
  const bool q_aligned = is_aligned(q, matrix.cols);
  const int64_t col = begin_col + threadIdx.x % kWarpSize * W;
  const bool active = col < tile.col_end;
  F factor[R][W];
  POWERSGD_UNROLL
  for (int k = 0; k < R; ++k) {
    POWERSGD_UNROLL
    for (int j = 0; j < W; ++j) factor[k][j] = 0;
    if (active && k < matrix.rank) load_q(q + k * matrix.cols + col, q_aligned, factor[k]);
  }
  for (int64_t begin = tile.row_begin; begin < tile.row_end; begin += kStagedRows<R>) {
    const int64_t left = tile.row_end - begin;
    const int rows = left < kStagedRows<R> ? static_cast<int>(left) : kStagedRows<R>;
    __syncthreads();
    stage_p<R>(bucket, matrix, begin, rows, 0, staged);
    __syncthreads();
    if (!active) continue;
    for (int row = threadIdx.x / kWarpSize; row < rows; row += kWarps) {
      F sum[W] = {};
      POWERSGD_UNROLL
      for (int k = 0; k < R; ++k) {
        const F p = staged[row * R + k];
        POWERSGD_UNROLL
        for (int j = 0; j < W; ++j) sum[j] += p * factor[k][j];
      }
      store_columns<Access::kNonTemporal>(gradient + (begin + row) * matrix.cols + col,
                                          bucket.gradient_dtype, sum);
    }
  }
}

// A tile at any rank, with the sums of eight rows in registers. The rank is taken in parts.
template <int W, typename G>
__device__ __forceinline__ void reconstruct_any_rank(const Bucket& bucket, const Matrix& matrix,
                                                     const Tile& tile, int64_t begin_col,
                                                     G* gradient) {
  using F = Factor<G>;
  constexpr int kRows = kStagedRows<kAnyRank>;
  constexpr int kRanks = kStagedRanks<kAnyRank>;
  F* const staged = reinterpret_cast<F*>(shared_memory());  // [kRows][kRanks]
  const F* const q = global(elements<F>(bucket.q_payload, matrix.q_offset));
  const bool q_aligned = is_aligned(q, matrix.cols);
  const int first = threadIdx.x / kWarpSize * kRowsAnyRank;
  const int64_t col = begin_col + threadIdx.x % kWarpSize * W;
  for (int64_t begin = tile.row_begin; begin < tile.row_end; begin += kRows) {
    const int64_t left = tile.row_end - begin;
    const int rows = left < kRows ? static_cast<int>(left) : kRows;
    F sum[kRowsAnyRank][W] = {};
    for (int64_t k0 = 0; k0 < matrix.rank; k0 += kRanks) {
      __syncthreads();
      stage_p<kAnyRank>(bucket, matrix, begin, rows, k0, staged);
      __syncthreads();
      if (col >= tile.col_end || first >= rows) continue;
      const int64_t left_ranks = matrix.rank - k0;
      const int ranks = left_ranks < kRanks ? static_cast<int>(left_ranks) : kRanks;
      const F* q_row = q + k0 * matrix.cols + col;
      POWERSGD_UNROLL_4
      for (int k = 0; k < (ranks + 3) / 4 * 4; ++k) {
        // Beyond the rank p is 0 and any row of Q will do, so no branch keeps the loads apart.
        F factor[W];
        load_q(q_row, q_aligned, factor);
        q_row += k + 1 < ranks ? matrix.cols : 0;
        POWERSGD_UNROLL
        for (int i = 0; i < kRowsAnyRank; ++i) {
          const F p = staged[k * kStagedStride + first + i];
          POWERSGD_UNROLL
          for (int j = 0; j < W; ++j) sum[i][j] += p * factor[j];
        }
      }
    }
    if (col >= tile.col_end) continue;
    POWERSGD_UNROLL
    for (int i = 0; i < kRowsAnyRank; ++i) {
      if (first + i < rows)
        store_columns<Access::kNonTemporal>(gradient + (begin + first + i) * matrix.cols + col,
                                            bucket.gradient_dtype, sum[i]);
    }
  }
}

// Columns [begin_col, begin_col + 32 W) of a tile.
template <int R, int W, typename G>
__device__ __forceinline__ void reconstruct_columns(const Bucket& bucket, const Matrix& matrix,
                                                    const Tile& tile, int64_t begin_col,
                                                    G* gradient) {
  if constexpr (R == kAnyRank)
    reconstruct_any_rank<W>(bucket, matrix, tile, begin_col, gradient);
  else
    reconstruct_low_rank<R, W>(bucket, matrix, tile, begin_col, gradient);
}

template <int R, typename G>
__global__ void __launch_bounds__(kThreads, R == kAnyRank ? 2 : 4)
    reconstruct_kernel(Bucket bucket, int64_t first_tile, int64_t tiles) {
  using F = Factor<G>;
  begin_kernel();
  const bool skip = bucket.state->skipped != 0;
  if (skip && blockIdx.x == 0 && threadIdx.x == 0) count_step(bucket, &StepCounts::skipped);
  if (blockIdx.x >= tiles) return;  // an empty bucket
  const Tile tile = bucket.tiles[first_tile + blockIdx.x];
  if (tile.kind == TileKind::kRawSegment) {
    unpack_raw<F>(bucket, tile, skip);
    return;
  }
  const Matrix matrix = bucket.matrices[tile.item];
  if (tile.kind == TileKind::kFactorRow) {
    update_factor_row<F>(bucket, matrix, tile.row_begin, skip);
    return;
  }
  if (skip) {
    skip_tile<F>(bucket, matrix, tile);
    return;
  }
  G* const gradient = static_cast<G*>(bucket.gradient) + matrix.gradient_offset;
  if (is_aligned(gradient, matrix.cols)) {
    reconstruct_columns<R, 4>(bucket, matrix, tile, tile.col_begin, gradient);
    return;
  }
  for (int64_t col = tile.col_begin; col < tile.col_end; col += kWarpSize)
    reconstruct_columns<R, 1>(bucket, matrix, tile, col, gradient);
}

template <int R, typename G>
Status launch_reconstruct(const Bucket& bucket, Stream stream) {
  using F = Factor<G>;
  const int64_t* begin = bucket.tile_list_begin.data();
  if (const Status status = launch(check_kernel<F>, begin[kStrips + 1] - begin[kStrips], kThreads,
                                   0, stream, bucket, begin[kStrips]);
      status != 0)
    return status;
  const size_t shared = std::max(kStagedBytes<R, F>, kWarps * sizeof(double));
  const int64_t tiles = begin[kReconstructTiles + 1] - begin[kReconstructTiles];
  return launch(reconstruct_kernel<R, G>, std::max<int64_t>(tiles, 1), kThreads, shared, stream,
                bucket, begin[kReconstructTiles], tiles);
}

template <typename G>
Status launch_by_rank(const Bucket& bucket, Stream stream) {
  return with_rank<1, 2, 4, 8>(
      bucket, [&](auto rank) { return launch_reconstruct<rank, G>(bucket, stream); });
}

}  // namespace

Status reconstruct(const Bucket& bucket, Stream stream) {
  if (bucket.factor_dtype == DType::kFloat64)
    return launch_reconstruct<kAnyRank, double>(bucket, stream);
  return bucket.gradient_dtype == DType::kFloat32 ? launch_by_rank<float>(bucket, stream)
                                                  : launch_by_rank<uint16_t>(bucket, stream);
}

}  // namespace powersgd::kernels::cuda
