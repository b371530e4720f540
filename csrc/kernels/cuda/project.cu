// SPDX-License-Identifier: BSD-3-Clause
//
// project: M = residual_scale * (memory - p_hat q_local) + G, memory = M, P = M q_warm^T.
//
// This pass reads both the gradient and memory. A tile is a group of 64 rows, or of 32 above rank
// 4, by a range of columns. Each warp takes 8 rows of it, or 4. A lane takes W columns at a time:
// four adjacent ones, or one where addresses do not allow vector accesses. So a warp goes through
// the tile in strips of 32 W columns. The block has the strips of q_local and q_warm in shared
// memory, each while it copies the next:
//   1. A lane loads its part of the gradient and of memory.
//   2. It adds the gradient, subtracts p_hat q_local and stores M.
//   3. It multiplies M by q_warm into rows x rank sums in registers.
// When the columns are done:
//   4. The warp adds the sums over its lanes. They are a part of P, or a partial one where the
//      matrix has several column ranges.
//   5. The last block of a row group adds the partial ones in their order. The last block of all
//      joins the flags of the tiles.
// P is computed from M as memory holds it, rounded. Error feedback then makes up for the rounding
// too.
#include "kernels/cuda/dispatch.cuh"
#include "kernels/cuda/form_m.cuh"
#include "kernels/cuda/panels.cuh"
#include "kernels/cuda/project_any_rank.cuh"
#include "kernels/cuda/project_sums.cuh"

namespace powersgd::kernels::cuda {
namespace {

// Registers are traded for blocks in flight.
template <int R, bool kAnyRank>
constexpr int kBlocksPerProcessor = kAnyRank || R > 8 ? 1 : 2;

template <int R, bool kAnyRank, typename F>
constexpr int kRowsPerWarp = project_rows_per_warp(kAnyRank ? kMaxFastRank + 1 : R,
                                                   sizeof(F) == 8);

// Shared memory holds the work, then p_hat's rows of each warp, then two panels.
template <int R, typename F>
constexpr size_t kSharedBytes = sizeof(Work) + sizeof(F) * (kWarps * kRowsPerWarp<R, false, F> * R +
                                                            2 * kPanelElements<R, 4, F>);

// The warp's rows of scale p_hat as [R][kRows], padded with zeros.
template <int R, int kRows, typename F, typename G, typename M>
__device__ __forceinline__ void stage_p(const Rows<kRows, F, G, M>& rows, F* p) {
  if (rows.memory == nullptr) return;
  for (int i = threadIdx.x % kWarpSize; i < kRows * R; i += kWarpSize) {
    const int row = i % kRows, k = i / kRows;
    p[i] = row < rows.count && k < rows.rank ? rows.scale * rows.p_hat[row * rows.rank + k] : F{0};
  }
  __syncwarp();
}

// Phases 1 to 3.
template <int R, int W, int kRows, typename F, typename G, typename M>
__device__ __forceinline__ void project_rows(Rows<kRows, F, G, M> rows, const Work& work,
                                             const F* p, F* shared_panels, ElementFlags* flags,
                                             F (&sums)[kRows * R]) {
  constexpr int kWidth = kWarpSize * W;
  const int cols = static_cast<int>(work.tile.col_end - work.tile.col_begin);
  const F* const q_local = global(static_cast<const F*>(work.matrix.q_local)) + work.tile.col_begin;
  const F* const q_warm = global(static_cast<const F*>(work.matrix.q_warm)) + work.tile.col_begin;
  Panels<R, W, F> panels(shared_panels);
  panels.fetch(q_local, rows.cols, rows.rank, 0, cols);
  POWERSGD_UNROLL
  for (int i = 0; i < kRows * R; ++i) sums[i] = 0;
  POWERSGD_NO_UNROLL
  for (int begin = 0; begin < cols; begin += kWidth) {
    const int col = begin + static_cast<int>(threadIdx.x) % kWarpSize * W;
    const bool active = col < cols && rows.count > 0;
    hide_from_optimizer(rows.cols);
    StoredElements<kRows, W, G, M> stored;
    F m[kRows][W];
    if (active) stored.load(rows, col);
    panels.turn();
    panels.fetch(q_warm, rows.cols, rows.rank, begin, cols);
    if (active) {
      add_gradient(rows, stored, m, flags);
      POWERSGD_UNROLL
      for (int k = 0; k < R; ++k) {
        if (rows.memory == nullptr) break;
        F q[W];
        panels.load(k, q);
        subtract_product(p + k * kRows, q, m);
      }
      store_m(rows, col, m, flags);
    }
    panels.turn();
    panels.fetch(q_local, rows.cols, rows.rank, begin + kWidth, cols);
    if (!active) continue;
    POWERSGD_UNROLL
    for (int k = 0; k < R; ++k) {
      F q[W];
      panels.load(k, q);
      POWERSGD_UNROLL
      for (int i = 0; i < kRows; ++i) {
        POWERSGD_UNROLL
        for (int j = 0; j < W; ++j) sums[i * R + k] += m[i][j] * q[j];
      }
    }
  }
  __pipeline_wait_prior(0);
}

template <int R, int W, typename F, typename G, typename M>
__device__ __forceinline__ void project_tile(const Bucket& bucket, Work* work) {
  constexpr int kRows = kRowsPerWarp<R, false, F>;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  F* const factors = reinterpret_cast<F*>(work + 1);  // [kWarps][R][kRows]
  F* const p = factors + warp * kRows * R;
  const auto rows = rows_of<kRows, F, G, M>(bucket, *work, warp * kRows);
  stage_p<R>(rows, p);
  F sums[kRows * R];
  project_rows<R, W>(rows, *work, p, factors + kWarps * kRows * R, &work->flags, sums);
  write_lane_sums<R, kRows>(bucket, *work, warp * kRows, 0, sums);
}

template <int R, bool kAnyRank, typename F, typename G, typename M>
__global__ void __launch_bounds__(kThreads, (kBlocksPerProcessor<R, kAnyRank>))
    project_kernel(Bucket bucket, int64_t first_tile, int64_t tiles) {
  Work* const work = begin_work(bucket, first_tile);
  if (work->tile.kind == TileKind::kRawSegment) {
    pack_raw<F, G>(bucket, work);
  } else {
    const Matrix& matrix = work->matrix;
    const bool aligned =
        is_aligned(static_cast<const G*>(bucket.gradient) + matrix.gradient_offset, matrix.cols) &&
        is_aligned(static_cast<const M*>(matrix.memory), matrix.cols) &&
        is_aligned(static_cast<const F*>(matrix.q_local), matrix.cols) &&
        is_aligned(static_cast<const F*>(matrix.q_warm), matrix.cols);
    if constexpr (kAnyRank) {
      if (aligned)
        project_tile_of_any_rank<R, 4, F, G, M>(bucket, work);
      else
        project_tile_of_any_rank<R, 1, F, G, M>(bucket, work);
    } else {
      if (aligned)
        project_tile<R, 4, F, G, M>(bucket, work);
      else
        project_tile<R, 1, F, G, M>(bucket, work);
    }
    add_column_ranges<F>(bucket, *work);
  }
  add_flags(bucket, *work);
  if (is_last_to_arrive(&bucket.counters[kProjectArrivals], static_cast<uint64_t>(tiles)))
    write_flags<F>(bucket);
}

// A bucket without tiles.
template <typename F>
__global__ void __launch_bounds__(kThreads) write_flags_kernel(Bucket bucket) {
  write_flags<F>(bucket);
}

struct LaunchProject {
  template <int R, bool kAnyRank, typename F, typename G, typename M>
  static Status run(const Bucket& bucket, Stream stream) {
    const int64_t* begin = bucket.tile_list_begin.data();
    const int64_t tiles = begin[kProjectTiles + 1] - begin[kProjectTiles];
    if (tiles == 0)
      return launch<write_flags_kernel<F>>(1, 0, stream, Predecessor::kAnything, bucket);
    return launch<project_kernel<R, kAnyRank, F, G, M>>(
        tiles, kAnyRank ? sizeof(Work) : kSharedBytes<R, F>, stream, Predecessor::kAnything, bucket,
        begin[kProjectTiles], tiles);
  }
};

}  // namespace

Status project(const Bucket& bucket, Stream stream) {
  return dispatch<LaunchProject>(bucket, stream);
}

}  // namespace powersgd::kernels::cuda
