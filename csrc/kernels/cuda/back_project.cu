// SPDX-License-Identifier: BSD-3-Clause
//
// back_project: q = p_hat^T M, into q_local and the Q payload.
//
// A tile is a strip of 128 columns by a range of rows. A lane takes four columns. Where addresses
// do not allow vector accesses it takes one, and the strip is taken in four parts. The warps take
// the rows in turn, several at a time:
//   1. The block copies p_hat's rows to shared memory.
//   2. A lane adds up rank x 4 sums, with 4 or 8 independent vector loads of M at a time.
//   3. The warps' sums are added in shared memory, in the order of the warps.
// A skipped step sends zeros, and so does a matrix that no rank uses.
// Where a strip has several row ranges, 3. writes to the workspace, and a second kernel adds the
// ranges in their order.
#include "kernels/cuda/dispatch.cuh"
#include "kernels/cuda/elements.cuh"
#include "kernels/cuda/strips.cuh"

namespace powersgd::kernels::cuda {
namespace {

constexpr int kStagedRows = 256;  // of p_hat, in shared memory at a time

// Registers are traded for blocks in flight, and blocks for rows of M that a warp loads at a time.
// That keeps 64 KB of loads in flight per multiprocessor at low ranks, and 32 KB at high ones.
template <int R, typename F>
constexpr int kBlocksPerProcessor = sizeof(F) == 8 ? 2
                                    : R <= 4       ? 4
                                    : R <= 16      ? 2
                                                   : 1;
template <int R, int W>
constexpr int kBatch = W == 1              ? 16
                       : R == 8 || R == 32 ? 8
                                           : 4;

template <int R, typename F>
constexpr size_t kSharedBytes = sizeof(F) * std::max(kStagedRows * R, kReduceElements<R>);

template <int W, typename F>
__device__ __forceinline__ void keep_finite(F (&m)[W], bool is_gradient) {
  if (!is_gradient) return;
  POWERSGD_UNROLL
  for (int j = 0; j < W; ++j) m[j] = is_finite(m[j]) ? m[j] : F{0};
}

// Phases 1 and 2 for columns [k0, k0 + R) of p_hat. S is the storage of M.
template <int R, int W, typename S>
__device__ __forceinline__ void accumulate(const Matrix& matrix, const Tile& tile, const S* m_base,
                                           DType dtype, bool is_gradient, int64_t k0, int64_t col,
                                           Factor<S> (&sums)[R][W]) {
  using F = Factor<S>;
  F* const staged = reinterpret_cast<F*>(shared_memory());  // [kStagedRows][R]
  const F* const p_hat = static_cast<const F*>(matrix.p_hat);
  const int warp = threadIdx.x / kWarpSize;
  POWERSGD_UNROLL
  for (int k = 0; k < R; ++k) {
    POWERSGD_UNROLL
    for (int j = 0; j < W; ++j) sums[k][j] = 0;
  }
  for (int64_t begin = tile.row_begin; begin < tile.row_end; begin += kStagedRows) {
    const int64_t left = tile.row_end - begin;
    const int rows = left < kStagedRows ? static_cast<int>(left) : kStagedRows;
    __syncthreads();
    for (int i = threadIdx.x; i < kStagedRows * R; i += kThreads) {
      const int64_t k = k0 + i % R;
      staged[i] = i / R < rows && k < matrix.rank ? p_hat[(begin + i / R) * matrix.rank + k] : F{0};
    }
    __syncthreads();
    if (col >= tile.col_end) continue;
    POWERSGD_NO_UNROLL
    for (int row = warp * kBatch<R, W>; row < rows; row += kWarps * kBatch<R, W>) {
      F m[kBatch<R, W>][W];
      POWERSGD_UNROLL
      for (int i = 0; i < kBatch<R, W>; ++i) {
        // A row beyond the last repeats it; its factors in shared memory are 0.
        const int64_t offset = (begin + (row + i < rows ? row + i : rows - 1)) * matrix.cols;
        load_columns<Access::kNonTemporal>(m_base + offset + col, dtype, m[i]);
      }
      POWERSGD_UNROLL
      for (int i = 0; i < kBatch<R, W>; ++i) {
        keep_finite(m[i], is_gradient);
        POWERSGD_UNROLL
        for (int k = 0; k < R; ++k) {
          const F p = staged[(row + i) * R + k];
          POWERSGD_UNROLL
          for (int j = 0; j < W; ++j) sums[k][j] += p * m[i][j];
        }
      }
    }
  }
}

// Columns [begin, begin + 32 W) of a tile.
template <int R, int W, typename S>
__device__ __forceinline__ void back_project_columns(const Bucket& bucket, const Matrix& matrix,
                                                     const Tile& tile, int64_t begin,
                                                     const S* m_base, DType dtype,
                                                     bool is_gradient) {
  using F = Factor<S>;
  for (int64_t k0 = 0; k0 < matrix.rank; k0 += R) {
    F sums[R][W];
    accumulate<R>(matrix, tile, m_base, dtype, is_gradient, k0, begin + threadIdx.x % kWarpSize * W,
                  sums);
    write_q<R>(bucket, matrix, tile, begin, k0, sums, reinterpret_cast<F*>(shared_memory()));
  }
}

template <int R, typename S>
__device__ __forceinline__ void back_project_tile(const Bucket& bucket, const Matrix& matrix,
                                                  const Tile& tile, const void* base,
                                                  int64_t offset, DType dtype, bool is_gradient) {
  const S* const m_base = global(static_cast<const S*>(base)) + offset;
  if (is_aligned(m_base, matrix.cols)) {
    back_project_columns<R, 4>(bucket, matrix, tile, tile.col_begin, m_base, dtype, is_gradient);
    return;
  }
  for (int64_t begin = tile.col_begin; begin < tile.col_end; begin += kWarpSize)
    back_project_columns<R, 1>(bucket, matrix, tile, begin, m_base, dtype, is_gradient);
}

template <typename F>
__device__ void send_zeros(const Bucket& bucket, const Matrix& matrix, const Tile& tile) {
  F* const q_local = static_cast<F*>(matrix.q_local);
  F* const payload = elements<F>(bucket.q_payload, matrix.q_offset);
  for (int64_t i = threadIdx.x; i < matrix.rank * kStrip; i += kThreads) {
    const int64_t col = tile.col_begin + i % kStrip;
    if (col >= tile.col_end) continue;
    payload[i / kStrip * matrix.cols + col] = 0;
    q_local[i / kStrip * matrix.cols + col] = 0;
  }
}

template <int R, typename F>
__global__ void __launch_bounds__(kThreads, (kBlocksPerProcessor<R, F>))
    back_project_kernel(Bucket bucket, int64_t first_tile) {
  begin_kernel();
  const Tile tile = bucket.tiles[first_tile + blockIdx.x];
  const Matrix matrix = bucket.matrices[tile.item];
  if (bucket.state->skipped != 0 || out_of_use<F>(bucket, matrix)) {
    if (tile.row_begin == 0) send_zeros<F>(bucket, matrix, tile);
    return;
  }
  const bool is_gradient = matrix.memory == nullptr;
  const void* base = is_gradient ? bucket.gradient : matrix.memory;
  const int64_t offset = is_gradient ? matrix.gradient_offset : 0;
  const DType dtype = is_gradient ? bucket.gradient_dtype : bucket.residual_dtype;
  if constexpr (sizeof(F) == 8)
    back_project_tile<R, double>(bucket, matrix, tile, base, offset, dtype, is_gradient);
  else if (dtype == DType::kFloat32)
    back_project_tile<R, float>(bucket, matrix, tile, base, offset, dtype, is_gradient);
  else
    back_project_tile<R, uint16_t>(bucket, matrix, tile, base, offset, dtype, is_gradient);
}

// The sum of a strip's row ranges, for every ranks-th row of q.
template <typename F>
__global__ void __launch_bounds__(kThreads)
    sum_kernel(Bucket bucket, int64_t first_tile, int ranks) {
  begin_kernel();
  if (bucket.state->skipped != 0) return;
  const Tile tile = bucket.tiles[first_tile + blockIdx.x / ranks];
  const Matrix matrix = bucket.matrices[tile.item];
  if (out_of_use<F>(bucket, matrix)) return;
  sum_row_ranges<F>(bucket, matrix, tile, static_cast<int>(blockIdx.x % ranks), ranks);
}

template <int R, typename F>
Status launch_back_project(const Bucket& bucket, Stream stream) {
  const int64_t* begin = bucket.tile_list_begin.data();
  if (const Status status =
          launch(back_project_kernel<R, F>, begin[kBackProjectTiles + 1] - begin[kBackProjectTiles],
                 kThreads, kSharedBytes<R, F>, stream, bucket, begin[kBackProjectTiles]);
      status != 0)
    return status;
  const int64_t strips = begin[kBackProjectSums + 1] - begin[kBackProjectSums];
  return launch(sum_kernel<F>, strips * R, kThreads, kStrip * sizeof(F), stream, bucket,
                begin[kBackProjectSums], R);
}

}  // namespace

Status back_project(const Bucket& bucket, Stream stream) {
  if (bucket.factor_dtype == DType::kFloat64) return launch_back_project<4, double>(bucket, stream);
  return with_rank<1, 2, 4, 8, 16, 32>(bucket, [&](auto rank) {
    constexpr int kRanks = rank == 0 ? 16 : rank;
    return launch_back_project<kRanks, float>(bucket, stream);
  });
}

}  // namespace powersgd::kernels::cuda
