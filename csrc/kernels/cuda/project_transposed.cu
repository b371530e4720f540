// SPDX-License-Identifier: BSD-3-Clause
//
// project_transposed: M = residual_scale * (memory - p_local q_warm) + G, memory = M,
// q = p_hat^T M, into q_local and the Q payload.
//
// This does the work of project and back_project in one pass over the gradient and memory. A tile
// is a strip of 128 columns by a range of rows. A lane takes four columns. Where addresses do not
// allow vector accesses it takes one, and the strip is taken in four parts. The block copies the
// tile's rows of p_local and p_hat to shared memory. Then the warps take the rows in turn, four at
// a time:
//   1. A warp loads the gradient and memory, by 8 independent vector loads per lane.
//   2. It adds the gradient, subtracts p_local q_warm and stores M.
//   3. It multiplies M by p_hat into rank x 4 sums in registers.
// When the rows are done:
//   4. The warps' sums are added in shared memory, in the order of the warps.
// Where a strip has several row ranges, 4. writes to the workspace. A second kernel adds the ranges
// in their order, and joins the tiles' flags. q is computed from M as memory holds it, rounded, as
// P is in project.
#include "kernels/cuda/dispatch.cuh"
#include "kernels/cuda/form_m.cuh"
#include "kernels/cuda/strips.cuh"

namespace powersgd::kernels::cuda {
namespace {

// Rows of p_local, and of p_hat, in shared memory at a time: 16 KB of each at most.
template <int R>
constexpr int kStagedRows = R <= 16 ? 256 : 128;

// Registers are traded for blocks in flight.
template <int R, bool kAnyRank>
constexpr int kBlocksPerProcessor = kAnyRank || R > 16 ? 1
                                    : R > 4            ? 2
                                    : R > 1            ? 3
                                                       : 4;

// Shared memory holds the work, then the staged rows. The warps' sums take their place.
template <int R, typename F>
constexpr size_t kSharedBytes =
    sizeof(Work) + sizeof(F) * std::max(2 * kStagedRows<R> * R, kReduceElements<R>);

// Copies columns [k0, k0 + R) of a factor's rows [row, row + rows), times scale, to shared memory.
// Every kRows rows lie as [R][kRows], padded with zeros.
template <int R, typename F>
__device__ __forceinline__ void stage(const void* factor, int64_t rank, int64_t row, int rows,
                                      int k0, F scale, F* staged) {
  const F* const from = global(static_cast<const F*>(factor)) + row * rank + k0;
  const int padded = static_cast<int>(ceil_div(rows, kRows)) * kRows;
  int thread = threadIdx.x;
  hide_from_optimizer(
      thread);  // the sums need the registers that the elements' addresses would take
  for (int i = thread; i < padded * R; i += kThreads) {
    const int r = i / R, k = i % R;
    staged[(r / kRows * R + k) * kRows + r % kRows] =
        r < rows && k0 + k < rank ? scale * from[r * rank + k] : F{0};
  }
}

// The `count` rows of the tile from `first` on.
template <typename F, typename G, typename M>
__device__ __forceinline__ Rows<F, G, M> rows_at(const Bucket& bucket, const Work& work, int first,
                                                 int count) {
  const Matrix& matrix = work.matrix;
  const int64_t row = work.tile.row_begin + first;
  const int64_t offset = row * matrix.cols + work.tile.col_begin;
  const bool feedback = matrix.memory != nullptr;  // without it p_local may be null too
  Rows<F, G, M> rows;
  rows.gradient = static_cast<const G*>(bucket.gradient) + matrix.gradient_offset + offset;
  rows.memory = global(feedback ? static_cast<M*>(matrix.memory) + offset : nullptr);
  rows.sent_p =
      global(feedback ? static_cast<const F*>(matrix.p_local) + row * matrix.rank : nullptr);
  rows.sent_q = global(static_cast<const F*>(matrix.q_warm)) + work.tile.col_begin;
  rows.cols = matrix.cols;
  rows.rank = static_cast<int>(matrix.rank);
  rows.count = count;
  rows.gradient_dtype = bucket.gradient_dtype;
  rows.residual_dtype = bucket.residual_dtype;
  rows.scale = static_cast<F>(bucket.residual_scale);
  return rows;
}

// Phases 1 to 3 for rows [k0, k0 + R) of q, at W columns of each lane from `first_col` of the tile.
template <int R, bool kAnyRank, bool kExact, int W, typename G, typename M, typename F>
__device__ __forceinline__ void accumulate(const Bucket& bucket, Work* work, int first_col, int k0,
                                           F (&sums)[R][W]) {
  const Tile& tile = work->tile;
  const Matrix& matrix = work->matrix;
  F* const sent_p = reinterpret_cast<F*>(work + 1);
  F* const p_hat = sent_p + kStagedRows<R> * R;
  const int warp = threadIdx.x / kWarpSize;
  const int col = first_col + static_cast<int>(threadIdx.x) % kWarpSize * W;
  const int tile_rows = static_cast<int>(tile.row_end - tile.row_begin);
  POWERSGD_UNROLL
  for (int k = 0; k < R; ++k) {
    POWERSGD_UNROLL
    for (int j = 0; j < W; ++j) sums[k][j] = 0;
  }
  POWERSGD_NO_UNROLL
  for (int begin = 0; begin < tile_rows; begin += kStagedRows<R>) {
    const int rows = tile_rows - begin < kStagedRows<R> ? tile_rows - begin : kStagedRows<R>;
    const int64_t row = tile.row_begin + begin;
    __syncthreads();
    if (!kAnyRank && matrix.memory != nullptr)
      stage<R>(matrix.p_local, matrix.rank, row, rows, 0, static_cast<F>(bucket.residual_scale),
               sent_p);
    stage<R>(matrix.p_hat, matrix.rank, row, rows, k0, F{1}, p_hat);
    __syncthreads();
    if (col >= static_cast<int>(tile.col_end - tile.col_begin)) continue;
    POWERSGD_NO_UNROLL
    for (int first = warp * kRows; first < rows; first += kWarps * kRows) {
      const int count = rows - first < kRows ? rows - first : kRows;
      const Rows<F, G, M> four = rows_at<F, G, M>(bucket, *work, begin + first, count);
      F m[kRows][W];
      if (!kAnyRank || k0 == 0)
        form_m<R, kAnyRank, kExact, W, kAnyRank ? Access::kReuse : Access::kNonTemporal>(
            four, col, sent_p + first * R, m, &work->flags);
      else
        reload_m<W>(four, col, m);
      POWERSGD_UNROLL
      for (int k = 0; k < R; ++k) {
        F p[kRows];  // 0 beyond the last row
        load_columns<Access::kReuse>(p_hat + first * R + k * kRows, DType::kFloat32, p);
        POWERSGD_UNROLL
        for (int i = 0; i < kRows; ++i) {
          POWERSGD_UNROLL
          for (int j = 0; j < W; ++j) sums[k][j] += p[i] * m[i][j];
        }
      }
    }
  }
}

// One tile, W columns per lane.
struct ProjectTransposedTile {
  template <int R, bool kAnyRank, bool kExact, int W, typename F, typename G, typename M>
  __device__ __forceinline__ static void run(const Bucket& bucket, Work* work) {
    F* const shared = reinterpret_cast<F*>(work + 1);
    POWERSGD_NO_UNROLL
    for (int first_col = 0; first_col < static_cast<int>(work->tile.col_end - work->tile.col_begin);
         first_col += kWarpSize * W) {
      POWERSGD_NO_UNROLL
      for (int k0 = 0; k0 < (kAnyRank ? static_cast<int>(work->matrix.rank) : 1); k0 += R) {
        F sums[R][W];
        accumulate<R, kAnyRank, kExact, W, G, M>(bucket, work, first_col, k0, sums);
        write_q<R>(bucket, work->matrix, work->tile, work->tile.col_begin + first_col, k0, sums,
                   shared);
      }
    }
  }
};

template <int R, bool kAnyRank, typename F, typename G, typename M>
__global__ void __launch_bounds__(kThreads, (kBlocksPerProcessor<R, kAnyRank>))
    project_transposed_kernel(Bucket bucket, int64_t first_tile) {
  begin_kernel();
  run_tile<R, kAnyRank, F, G, M, ProjectTransposedTile>(bucket, first_tile);
}

// Block 0 joins the flags of all tiles. Each other block adds every ranks-th row of q in a strip
// that has several row ranges, or writes whether a matrix is active.
template <typename F>
__global__ void __launch_bounds__(kThreads)
    finish_transposed_kernel(Bucket bucket, int64_t tiles, int64_t first_tile, int ranks) {
  begin_kernel();
  if (blockIdx.x == 0) {
    finish_step_flags<F>(bucket, tiles);
    return;
  }
  const Tile tile = bucket.tiles[first_tile + (blockIdx.x - 1) / ranks];
  const Matrix matrix = bucket.matrices[tile.item];
  const int first = static_cast<int>((blockIdx.x - 1) % ranks);
  if (tile.kind == TileKind::kSum)
    sum_row_ranges<F>(bucket, matrix, tile, first, ranks);
  else if (first == 0)
    write_flag<F>(bucket, kNonZero, tile.first_part, tile.first_part + tile.parts,
                  matrix.active_offset);
}

struct LaunchProjectTransposed {
  template <int R, bool kAnyRank, typename F, typename G, typename M>
  static Status run(const Bucket& bucket, Stream stream) {
    const int64_t* begin = bucket.tile_list_begin.data();
    const int64_t tiles = begin[kProjectTransposedTiles + 1] - begin[kProjectTransposedTiles];
    const int64_t sums = begin[kProjectTransposedSums + 1] - begin[kProjectTransposedSums];
    static_assert(kSharedBytes<R, F> <= 48 << 10, "more than a kernel gets without asking");
    if (const Status status =
            launch(project_transposed_kernel<R, kAnyRank, F, G, M>, tiles, kThreads,
                   kSharedBytes<R, F>, stream, bucket, begin[kProjectTransposedTiles]);
        status != 0)
      return status;
    return launch(finish_transposed_kernel<F>, 1 + sums * R, kThreads, kStrip * sizeof(F), stream,
                  bucket, tiles, begin[kProjectTransposedSums], R);
  }
};

}  // namespace

Status project_transposed(const Bucket& bucket, Stream stream) {
  return dispatch<LaunchProjectTransposed>(bucket, stream);
}

}  // namespace powersgd::kernels::cuda
