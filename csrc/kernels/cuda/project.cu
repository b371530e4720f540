// SPDX-License-Identifier: BSD-3-Clause
//
// project: M = S_new / S_old * (memory - p_hat q_local) + G, memory = M, P = M q_warm^T.
//
// This pass reads both the gradient and memory. A tile is a range of rows, and of columns where the
// matrix is very wide. A group of 1 to 8 warps takes four rows at a time and splits their columns.
// A lane takes W columns at a time: four adjacent ones, or one where addresses do not allow vector
// accesses. The group does this for all columns:
//   1. It loads the gradient and memory, by 8 independent vector loads per lane.
//   2. It adds the gradient, subtracts p_hat q_local and stores M.
//   3. It multiplies M by q_warm into 4 x rank sums in registers.
// When the columns are done:
//   4. It adds the sums over the lanes, then over the warps of the group through shared memory.
// A second kernel adds the column ranges' partial sums, and joins the tiles' flags. P is computed
// from M as memory holds it, rounded. Error feedback then makes up for the rounding too.
#include "kernels/cuda/dispatch.cuh"
#include "kernels/cuda/form_m.cuh"
#include "kernels/cuda/reduce.cuh"

namespace powersgd::kernels::cuda {
namespace {

// Registers are traded for blocks in flight.
template <int R, bool kAnyRank>
constexpr int kBlocksPerProcessor = kAnyRank || R > 8 ? 1
                                    : R > 4           ? 2
                                                      : 3;

// Shared memory holds the work, then p_hat's rows and the sums of each warp.
template <int R, typename F>
constexpr size_t kSharedBytes = sizeof(Work) + 2 * kWarps * kRows * R * sizeof(F);

// Where a tile's part of P goes.
template <typename F>
__device__ __forceinline__ F* output(const Bucket& bucket, const Work& work) {
  const Matrix& matrix = work.matrix;
  if (matrix.cols <= kSplitColumns) return global(elements<F>(bucket.p_payload, matrix.p_offset));
  const int64_t stride = slots(matrix.rows * matrix.rank * int64_t{sizeof(F)});
  return global(
      slot_pointer<F>(bucket, work.tile.slot + work.tile.col_begin / kSplitColumns * stride));
}

// How the warps of a block share the rows and columns of a tile.
struct Share {
  int group_warps;  // share four rows and split their columns
  int group, member;

  __device__ explicit Share(const Tile& tile)
      : group_warps(warps_per_group(tile.col_end - tile.col_begin)),
        group(threadIdx.x / kWarpSize / group_warps),
        member(threadIdx.x / kWarpSize % group_warps) {}
};

// The columns of a lane. q_warm points to the tile's first column.
template <typename F>
struct Columns {
  const F* q_warm;
  int begin, end, step;  // columns of the tile, for this lane
};

// The warp's four rows of a pass, or none if they are beyond the tile's end.
template <typename F, typename G, typename M>
__device__ __forceinline__ Rows<F, G, M> rows_of(const Bucket& bucket, const Work& work, int pass) {
  const Tile& tile = work.tile;
  const Matrix& matrix = work.matrix;
  const Share share(tile);
  const int first = pass + share.group * kRows;
  const int left = static_cast<int>(tile.row_end - tile.row_begin) - first;
  const int64_t row = tile.row_begin + (left > 0 ? first : 0);
  const int64_t offset = row * matrix.cols + tile.col_begin;
  Rows<F, G, M> rows;
  rows.count = left < 0 ? 0 : left < kRows ? left : kRows;
  rows.gradient = static_cast<const G*>(bucket.gradient) + matrix.gradient_offset + offset;
  rows.memory =
      global(matrix.memory == nullptr ? nullptr : static_cast<M*>(matrix.memory) + offset);
  rows.p_hat = global(static_cast<const F*>(matrix.p_hat)) + row * matrix.rank;
  rows.q_local = global(static_cast<const F*>(matrix.q_local)) + tile.col_begin;
  rows.cols = matrix.cols;
  rows.rank = static_cast<int>(matrix.rank);
  rows.gradient_dtype = bucket.gradient_dtype;
  rows.residual_dtype = bucket.residual_dtype;
  rows.scale = static_cast<F>(residual_scale(bucket, matrix));
  return rows;
}

template <int W, typename F>
__device__ __forceinline__ Columns<F> columns_of(const Work& work, bool any_rows) {
  const Tile& tile = work.tile;
  const Share share(tile);
  return {global(static_cast<const F*>(work.matrix.q_warm)) + tile.col_begin,
          (share.member * kWarpSize + static_cast<int>(threadIdx.x) % kWarpSize) * W,
          any_rows ? static_cast<int>(tile.col_end - tile.col_begin) : 0,
          share.group_warps * kWarpSize * W};
}

// The warp's rows of scale p_hat as [R][kRows], padded with zeros.
template <int R, typename F, typename G, typename M>
__device__ __forceinline__ void stage_p(const Rows<F, G, M>& rows, F* p) {
  if (rows.memory == nullptr) return;
  for (int i = threadIdx.x % kWarpSize; i < kRows * R; i += kWarpSize) {
    const int row = i % kRows, k = i / kRows;
    p[i] = row < rows.count && k < rows.rank ? rows.scale * rows.p_hat[row * rows.rank + k] : F{0};
  }
  __syncwarp();
}

// Phases 1 to 3 for columns [k0, k0 + R) of P.
template <int R, bool kAnyRank, bool kExact, int W, typename F, typename G, typename M>
__device__ __forceinline__ void project_rows(Rows<F, G, M> rows, const Columns<F>& columns, int k0,
                                             const F* p, ElementFlags* flags,
                                             F (&sums)[kRows * R]) {
  int start = 0;
  POWERSGD_UNROLL
  for (int i = 0; i < kRows * R; ++i) sums[i] = 0;
  POWERSGD_NO_UNROLL
  for (int col = columns.begin; col < columns.end; col += columns.step) {
    F m[kRows][W];
    hide_from_optimizer(rows.cols);
    hide_from_optimizer(start);
    if (!kAnyRank || k0 == 0)
      form_m<R, kAnyRank, kExact, W>(rows, col, p + start, m, flags);
    else
      reload_m<W>(rows, col, m);
    const F* q_row = columns.q_warm + k0 * rows.cols + col;
    POWERSGD_UNROLL
    for (int k = 0; k < R; ++k) {
      if (!kExact && k0 + k >= rows.rank) continue;
      F q[W];
      load_columns<Access::kReuse>(q_row, DType::kFloat32, q);
      q_row += rows.cols;
      POWERSGD_UNROLL
      for (int i = 0; i < kRows; ++i) {
        POWERSGD_UNROLL
        for (int j = 0; j < W; ++j) sums[i * R + k] += m[i][j] * q[j];
      }
    }
  }
}

// Phase 4: columns [k0, k0 + R) of P from the lanes' sums. Called by all threads of the block.
template <int R, typename F>
__device__ __forceinline__ void write_sums(const Bucket& bucket, const Work& work, int pass, int k0,
                                           F (&sums)[kRows * R], F* partial) {
  const Matrix& matrix = work.matrix;
  const Share share(work.tile);  // computed again rather than kept in registers
  const int warp = threadIdx.x / kWarpSize;
  reduce_lanes(sums);
  store_lane_sums(sums, partial + warp * kRows * R);
  __syncthreads();
  F* const out = output<F>(bucket, work);
  const int lane = threadIdx.x % kWarpSize;
  for (int i = share.member * kWarpSize + lane; i < kRows * R; i += share.group_warps * kWarpSize) {
    F sum = 0;
    for (int w = 0; w < share.group_warps; ++w)
      sum += partial[(share.group * share.group_warps + w) * kRows * R + i];
    const int64_t row = work.tile.row_begin + pass + share.group * kRows + i / R;
    const int k = k0 + i % R;
    if (row >= work.tile.row_end || k >= matrix.rank) continue;
    out[row * matrix.rank + k] = sum;
  }
  __syncthreads();
}

// One tile. In each pass over its rows, every group of warps takes four of them.
struct ProjectTile {
  template <int R, bool kAnyRank, bool kExact, int W, typename F, typename G, typename M>
  __device__ __forceinline__ static void run(const Bucket& bucket, Work* work) {
    const int group_rows =
        kWarps / warps_per_group(work->tile.col_end - work->tile.col_begin) * kRows;
    F* const factors = reinterpret_cast<F*>(work + 1);  // [kWarps][R][kRows]
    F* const partial = factors + kWarps * kRows * R;    // [kWarps][kRows][R]
    F* const p = factors + threadIdx.x / kWarpSize * kRows * R;
    const int tile_rows = static_cast<int>(work->tile.row_end - work->tile.row_begin);
    POWERSGD_NO_UNROLL
    for (int pass = 0; pass < tile_rows; pass += group_rows) {
      const Rows<F, G, M> rows = rows_of<F, G, M>(bucket, *work, pass);
      const Columns<F> columns = columns_of<W, F>(*work, rows.count > 0);
      if constexpr (!kAnyRank) stage_p<R>(rows, p);
      for (int k0 = 0; k0 < (kAnyRank ? rows.rank : 1); k0 += R) {
        F sums[kRows * R];
        project_rows<R, kAnyRank, kExact, W>(rows, columns, k0, p, &work->flags, sums);
        write_sums<R>(bucket, *work, pass, k0, sums, partial);
      }
    }
  }
};

template <int R, bool kAnyRank, typename F, typename G, typename M>
__global__ void __launch_bounds__(kThreads, (kBlocksPerProcessor<R, kAnyRank>))
    project_kernel(Bucket bucket, int64_t first_tile) {
  begin_kernel();
  run_tile<R, kAnyRank, F, G, M, ProjectTile>(bucket, first_tile);
}

// Block 0 joins the flags of all tiles, and notes the units of memory. Each other block writes
// whether a matrix is active, or adds one row range of a matrix that was projected in column
// ranges.
template <typename F>
__global__ void __launch_bounds__(kThreads)
    finish_kernel(Bucket bucket, int64_t tiles, int64_t first_tile) {
  begin_kernel();
  if (blockIdx.x == 0) {
    finish_step_flags<F>(bucket, tiles);
    for (int i = threadIdx.x; i < bucket.num_matrices; i += kThreads)
      *bucket.matrices[i].grad_scale = loss_scale(bucket);
    return;
  }
  const Tile tile = bucket.tiles[first_tile + blockIdx.x - 1];
  const Matrix matrix = bucket.matrices[tile.item];
  if (tile.kind == TileKind::kActivity) {
    write_flag<F>(bucket, kNonZero, tile.first_part, tile.first_part + tile.parts,
                  matrix.active_offset);
    return;
  }
  const int64_t stride = slots(matrix.rows * matrix.rank * sizeof(F)) * (kSlotBytes / sizeof(F));
  const F* partial = slot_pointer<F>(bucket, tile.slot);
  F* p = elements<F>(bucket.p_payload, matrix.p_offset);
  for (int64_t i = tile.row_begin * matrix.rank + threadIdx.x; i < tile.row_end * matrix.rank;
       i += kThreads) {
    F sum = 0;
    for (int64_t part = 0; part < tile.parts; ++part) sum += partial[part * stride + i];
    p[i] = sum;
  }
}

struct LaunchProject {
  template <int R, bool kAnyRank, typename F, typename G, typename M>
  static Status run(const Bucket& bucket, Stream stream) {
    const int64_t* begin = bucket.tile_list_begin.data();
    const int64_t tiles = begin[kProjectTiles + 1] - begin[kProjectTiles];
    const int64_t sums = begin[kProjectSums + 1] - begin[kProjectSums];
    if (const Status status = launch(project_kernel<R, kAnyRank, F, G, M>, tiles, kThreads,
                                     kSharedBytes<R, F>, stream, bucket, begin[kProjectTiles]);
        status != 0)
      return status;
    return launch(finish_kernel<F>, 1 + sums, kThreads, 0, stream, bucket, tiles,
                  begin[kProjectSums]);
  }
};

}  // namespace

Status project(const Bucket& bucket, Stream stream) {
  return dispatch<LaunchProject>(bucket, stream);
}

}  // namespace powersgd::kernels::cuda
