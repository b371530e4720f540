// SPDX-License-Identifier: BSD-3-Clause
//
// back_project: q = p_hat^T M, into q_local and the Q payload.
//
// A tile is a strip of 128 columns by a range of rows. A lane takes four adjacent columns. The
// warps take the rows in turn, several at a time:
//   1. A lane loads its first part of M. Only p_hat is new since project, so this may happen while
//      orthogonalize still runs.
//   2. The block copies p_hat's rows to shared memory.
//   3. A lane adds up rank x 4 sums, with 4 or 8 independent vector loads of M at a time.
//   4. The warps' sums are added in shared memory, in the order of the warps.
// A skipped step sends zeros, and so does a matrix that no rank uses.
// Above rank 8, products in bfloat16 may take the place of 3. and 4. (back_project_bfloat16.cuh).
// Where a strip has several row ranges, 4. writes to the workspace, and the strip's last block adds
// the ranges in their order.
#include "kernels/cuda/back_project_bfloat16.cuh"
#include "kernels/cuda/dispatch.cuh"
#include "kernels/cuda/stored_m.cuh"
#include "kernels/cuda/work.cuh"

namespace powersgd::kernels::cuda {
namespace {

// Registers are traded for blocks in flight, and blocks for rows of M that a warp loads at a time.
// That keeps 64 KB of loads in flight per multiprocessor at low ranks, 32 KB at rank 16, and 16 KB
// at rank 32, where the products set the pace.
template <int R>
constexpr int kBlocksPerProcessor = R <= 4   ? 4
                                    : R <= 8 ? 2
                                             : 1;
template <int R>
constexpr int kBatch = R == 8 || R == 16 ? 8 : 4;

template <int R>
constexpr size_t kSharedBytes = sizeof(float) * std::max(kStagedRows * R, kReduceElements<R>);

// A lane's part of kBatch rows of M.
template <int R, typename S>
struct Batch {
  S stored[kBatch<R>][4];

  // Loads from row `row` of a chunk of `rows` on. A row beyond the last repeats it; its factors in
  // shared memory are 0.
  __device__ __forceinline__ void load(const S* chunk, int64_t cols, int row, int rows,
                                       const LaneColumns& columns) {
    POWERSGD_UNROLL
    for (int i = 0; i < kBatch<R>; ++i)
      load_stored<Access::kNonTemporal>(chunk + (row + i < rows ? row + i : rows - 1) * cols,
                                        columns, stored[i]);
  }

  // sums[k] += p_hat[row][k] M[row], for p as [kStagedRows][R] from this batch's first row on.
  __device__ __forceinline__ void multiply(const StoredM<S>& m, const float* p,
                                           float (&sums)[R][4]) const {
    POWERSGD_UNROLL
    for (int i = 0; i < kBatch<R>; ++i) {
      float values[4];
      widen_columns(stored[i], m.dtype, values);
      keep_finite(values, m.is_gradient);
      POWERSGD_UNROLL
      for (int k = 0; k < R; ++k) {
        POWERSGD_UNROLL
        for (int j = 0; j < 4; ++j) sums[k][j] += p[i * R + k] * values[j];
      }
    }
  }
};

// The columns of a lane in a tile.
__device__ __forceinline__ int64_t lane_column(const Tile& tile) {
  return tile.col_begin + threadIdx.x % kWarpSize * 4;
}
template <typename S>
__device__ __forceinline__ LaneColumns lane_columns(const Matrix& matrix, const Tile& tile,
                                                    const StoredM<S>& m) {
  return {is_aligned(m.base, matrix.cols), static_cast<int>(tile.col_end - lane_column(tile))};
}

// Phases 2 and 3. `batch` holds the warp's first rows if they are loaded.
template <int R, typename S>
__device__ __forceinline__ void accumulate(const Matrix& matrix, const Tile& tile,
                                           const StoredM<S>& m, Batch<R, S>& batch, bool loaded,
                                           float (&sums)[R][4]) {
  float* const staged = reinterpret_cast<float*>(shared_memory());  // [kStagedRows][R]
  const float* const p_hat = static_cast<const float*>(matrix.p_hat);
  const int warp = threadIdx.x / kWarpSize;
  const LaneColumns columns = lane_columns(matrix, tile, m);
  POWERSGD_UNROLL
  for (int k = 0; k < R; ++k) {
    POWERSGD_UNROLL
    for (int j = 0; j < 4; ++j) sums[k][j] = 0;
  }
  for (int64_t begin = tile.row_begin; begin < tile.row_end; begin += kStagedRows) {
    const int rows = rows_of_chunk(tile, begin);
    __syncthreads();
    int thread = static_cast<int>(threadIdx.x);
    hide_from_optimizer(thread);
    for (int i = thread; i < kStagedRows * R; i += kThreads) {
      const int64_t k = i % R;
      staged[i] = i / R < rows && k < matrix.rank ? p_hat[(begin + i / R) * matrix.rank + k] : 0.0f;
    }
    __syncthreads();
    if (columns.count <= 0) continue;
    const S* const chunk = m.base + begin * matrix.cols + lane_column(tile);
    POWERSGD_NO_UNROLL
    for (int row = warp * kBatch<R>; row < rows; row += kWarps * kBatch<R>) {
      if (!loaded) batch.load(chunk, matrix.cols, row, rows, columns);
      loaded = false;
      batch.multiply(m, staged + row * R, sums);
    }
  }
}

template <int R, typename S>
__device__ __forceinline__ void back_project_tile(const Bucket& bucket, const Matrix& matrix,
                                                  const Tile& tile) {
  const StoredM<S> m(bucket, matrix);
  const LaneColumns columns = lane_columns(matrix, tile, m);
  Batch<R, S> batch;
  const int rows = rows_of_chunk(tile, tile.row_begin);
  const int row = threadIdx.x / kWarpSize * kBatch<R>;
  const bool loaded = row < rows && columns.count > 0;
  if (loaded)
    batch.load(m.base + tile.row_begin * matrix.cols + lane_column(tile), matrix.cols, row, rows,
               columns);
  if (sends_zeros(bucket, matrix)) {
    send_zeros(bucket, matrix, tile);
    return;
  }
  float sums[R][4];
  accumulate<R>(matrix, tile, m, batch, loaded, sums);
  write_strip<R>(bucket, matrix, tile, sums, reinterpret_cast<float*>(shared_memory()));
  add_row_ranges(bucket, matrix, tile);
}

template <int R>
__global__ void __launch_bounds__(kThreads, (kBlocksPerProcessor<R>))
    back_project_kernel(Bucket bucket, int64_t first_tile) {
  const Tile tile = bucket.tiles[first_tile + blockIdx.x];
  const Matrix matrix = bucket.matrices[tile.item];
  const DType stored = matrix.memory == nullptr ? bucket.gradient_dtype : bucket.residual_dtype;
  if (stored == DType::kFloat32)
    back_project_tile<R, float>(bucket, matrix, tile);
  else
    back_project_tile<R, uint16_t>(bucket, matrix, tile);
}

template <int R>
__global__ void __launch_bounds__(kThreads, 2)
    back_project_bfloat16_kernel(Bucket bucket, int64_t first_tile) {
  const Work& work = *begin_work(bucket, bucket.tiles + first_tile);
  const DType stored =
      work.matrix.memory == nullptr ? bucket.gradient_dtype : bucket.residual_dtype;
  if (stored == DType::kFloat32)
    back_project_bfloat16_tile<R, float>(bucket, work.matrix, work.tile);
  else
    back_project_bfloat16_tile<R, uint16_t>(bucket, work.matrix, work.tile);
}

template <int R>
Status launch_back_project(const Bucket& bucket, Stream stream) {
  const int64_t* begin = bucket.tile_list_begin.data();
  const int64_t count = begin[kBackProjectTiles + 1] - begin[kBackProjectTiles];
  if constexpr (R > 8) {
    bool bfloat16 = false;
    const Status status = takes_bfloat16_products(bucket, &bfloat16);
    if (status != 0) return status;
    if (bfloat16)
      return launch<back_project_bfloat16_kernel<R>>(count, kBfloat16BytesOfBackProject<R>, stream,
                                                     Predecessor::kAllowsSuccessor, bucket,
                                                     begin[kBackProjectTiles]);
  }
  return launch<back_project_kernel<R>>(count, kSharedBytes<R>, stream,
                                        Predecessor::kAllowsSuccessor, bucket,
                                        begin[kBackProjectTiles]);
}

}  // namespace

Status back_project(const Bucket& bucket, Stream stream) {
  return with_rank<1, 2, 4, 8, 16, kMaxRank>(
      bucket, [&](auto rank) { return launch_back_project<rank>(bucket, stream); });
}

}  // namespace powersgd::kernels::cuda
