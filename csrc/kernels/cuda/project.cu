// SPDX-License-Identifier: BSD-3-Clause
//
// project: M = S_new / S_old * (memory - p_hat q_local) + G, memory = M, P = M q_warm^T.
//
// This pass reads both the gradient and memory. A tile is a group of 64 rows, or of 32 above rank
// 4, by a range of columns. Each warp takes 8 rows of it, or 4, and goes through their columns in
// strips of 128. A lane has four adjacent columns. The block has the strips of q_local and q_warm
// in shared memory, and copies the next while it uses them:
//   1. A lane loads its part of the gradient and of memory.
//   2. It adds the gradient, subtracts p_hat q_local and stores M.
//   3. It multiplies M by q_warm into rows x rank sums in registers.
// When the columns are done:
//   4. The warp adds the sums over its lanes. They are a part of P, or a partial one where the
//      matrix has several column ranges.
//   5. The last block of a row group adds the partial ones in their order. The last block of all
//      joins the flags of the tiles.
// Above rank 8, tensor cores may take the place of 1. to 4., see project_tensor.cuh.
// P is computed from M as memory holds it, rounded. Error feedback then makes up for the rounding
// too.
#include "kernels/cuda/dispatch.cuh"
#include "kernels/cuda/form_m.cuh"
#include "kernels/cuda/panels.cuh"
#include "kernels/cuda/project_any_rank.cuh"
#include "kernels/cuda/project_sums.cuh"
#include "kernels/cuda/project_tensor.cuh"

namespace powersgd::kernels::cuda {
namespace {

// Registers are traded for blocks in flight.
template <int R, bool kAnyRank>
constexpr int kBlocksPerProcessor = kAnyRank || R > 8 ? 1 : 2;

// Up to rank 16 both factors are at hand, so that M of a few rows is made and used up at once.
// Above, shared memory is too small for that, and q_local and q_warm take turns.
template <int R, typename F>
constexpr int kRowsPerWarp = project_rows_per_warp(R, sizeof(F) == 8);
template <int R>
constexpr bool kBothFactors = R <= 16;
template <int R, typename F>
using FactorPanels = Panels<kBothFactors<R> ? 2 * R : R, F>;

// Shared memory holds the work, then p_hat's rows of each warp, then the panels.
template <int R, typename F>
constexpr size_t kSharedBytes =
    sizeof(Work) + sizeof(F) * (kWarps * kRowsPerWarp<R, F> * R + FactorPanels<R, F>::kElements);

// The warp's rows of scale p_hat as [R][kRows], with zeros beyond the rank.
template <int R, int kRows, typename F, typename G, typename M>
__device__ __forceinline__ void stage_p(const Rows<kRows, F, G, M>& rows, F* p) {
  if (rows.memory == nullptr) return;
  for (int i = threadIdx.x % kWarpSize; i < kRows * R; i += kWarpSize) {
    const int row = i % kRows, k = i / kRows;
    const int existing = row < rows.count ? row : 0;  // as in Rows::offset()
    p[i] = k < rows.rank ? rows.scale * rows.p_hat[existing * rows.rank + k] : F{0};
  }
  __syncwarp();
}

// A warp's way through the strips of a tile.
template <int R, typename F, typename G, typename M>
class ProjectRows {
 public:
  static constexpr int kRows = kRowsPerWarp<R, F>;

  // p points to [R][kRows] elements of scale p_hat.
  __device__ ProjectRows(const Rows<kRows, F, G, M>& rows, Work* work, const F* p, F* panels)
      : rows_(rows), work_(work), p_(p), panels_(panels) {}

  // Phases 1 to 3: sums[i * R + k] becomes the lane's part of row i and column k of P.
  __device__ __forceinline__ void run(F (&sums)[kRows * R]) {
    POWERSGD_UNROLL
    for (int i = 0; i < kRows * R; ++i) sums[i] = 0;
    fetch_first(0);
    const int cols = static_cast<int>(work_->tile.col_end - work_->tile.col_begin);
    POWERSGD_NO_UNROLL
    for (int begin = 0; begin < cols; begin += kStrip) {
      col_ = begin + static_cast<int>(threadIdx.x) % kWarpSize * 4;
      active_ = col_ < cols && rows_.count > 0;
      hide_from_optimizer(rows_.cols);
      if constexpr (kBothFactors<R>)
        run_strip_with_both(begin, sums);
      else
        run_strip_in_turns(begin, sums);
    }
    __pipeline_wait_prior(0);
  }

 private:
  __device__ __forceinline__ LaneColumns columns() const {
    return rows_.columns(col_, static_cast<int>(work_->tile.col_end - work_->tile.col_begin));
  }

  // Begins to copy a strip of a factor. What this takes is in shared memory, and not in registers.
  __device__ __forceinline__ void fetch(const void* factor, int begin, int panel_row = 0) {
    panels_.template fetch<R>(global(static_cast<const F*>(factor)), work_->matrix, rows_.aligned,
                              work_->tile.col_begin + begin, work_->tile.col_end, panel_row);
  }

  __device__ __forceinline__ void fetch_first(int begin) {
    fetch(work_->matrix.q_local, begin);
    if constexpr (kBothFactors<R>) fetch(work_->matrix.q_warm, begin, R);
  }

  __device__ __forceinline__ void run_strip_with_both(int begin, F (&sums)[kRows * R]) {
    POWERSGD_UNROLL
    for (int first = 0; first < kRows; first += kLoadedRows) {
      F m[kLoadedRows][4];
      hide_from_optimizer(rows_.cols);
      if (active_) stored_.load(rows_, first, col_, columns());
      if (first == 0) {
        panels_.turn();
        fetch_first(begin + kStrip);
      }
      if (!active_) continue;
      form_m(first, m);
      multiply(first, R, m, sums);
    }
  }

  __device__ __forceinline__ void run_strip_in_turns(int begin, F (&sums)[kRows * R]) {
    F m[kLoadedRows][4];
    if (active_) stored_.load(rows_, 0, col_, columns());
    panels_.turn();
    fetch(work_->matrix.q_warm, begin);
    if (active_) form_m(0, m);
    panels_.turn();
    fetch_first(begin + kStrip);
    if (active_) multiply(0, 0, m, sums);
  }

  // M of kLoadedRows rows, from those stored. q_local is in the panel's first rows.
  __device__ __forceinline__ void form_m(int first, F (&m)[kLoadedRows][4]) {
    add_gradient(rows_, stored_, m, &work_->flags);
    // Unrolled in full, it would load all of q_local at once and run out of registers.
    POWERSGD_UNROLL_2
    for (int k = 0; k < R; ++k) {
      if (rows_.memory == nullptr) break;
      F q[4];
      panels_.load(k, q);
      subtract_product(p_ + k * kRows + first, q, m);
    }
    hide_from_optimizer(rows_.cols);
    store_m(rows_, first, col_, columns(), m, &work_->flags);
  }

  // sums += m q_warm^T, for q_warm in the panel from row `panel_row` on.
  __device__ __forceinline__ void multiply(int first, int panel_row, const F (&m)[kLoadedRows][4],
                                           F (&sums)[kRows * R]) {
    POWERSGD_UNROLL
    for (int k = 0; k < R; ++k) {
      F q[4];
      panels_.load(panel_row + k, q);
      POWERSGD_UNROLL
      for (int i = 0; i < kLoadedRows; ++i) {
        POWERSGD_UNROLL
        for (int j = 0; j < 4; ++j) sums[(first + i) * R + k] += m[i][j] * q[j];
      }
    }
  }

  Rows<kRows, F, G, M> rows_;
  Work* const work_;
  const F* const p_;
  FactorPanels<R, F> panels_;
  StoredElements<G, M> stored_;
  int col_ = 0;
  bool active_ = false;
};

template <int R, typename F, typename G, typename M>
__device__ __forceinline__ void project_tile(const Bucket& bucket, Work* work) {
  constexpr int kRows = kRowsPerWarp<R, F>;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  F* const factors = reinterpret_cast<F*>(work + 1);  // [kWarps][R][kRows]
  F* const p = factors + warp * kRows * R;
  const auto rows = rows_of<kRows, F, G, M>(bucket, *work, warp * kRows);
  stage_p<R>(rows, p);
  F sums[kRows * R];
  ProjectRows<R, F, G, M>(rows, work, p, factors + kWarps * kRows * R).run(sums);
  write_lane_sums<R, kRows>(bucket, *work, warp * kRows, 0, sums);
}

enum class Way { kAnyRank, kVectors, kTensorCores };

template <int R, Way kWay, typename F, typename G, typename M>
__global__ void __launch_bounds__(kThreads, (kBlocksPerProcessor<R, kWay == Way::kAnyRank>))
    project_kernel(Bucket bucket, int64_t first_tile, int64_t tiles) {
  Work* const work = begin_work(bucket, first_tile);
  if (work->tile.kind == TileKind::kRawSegment) {
    pack_raw<F, G>(bucket, work);
  } else {
    if constexpr (kWay == Way::kAnyRank)
      project_tile_of_any_rank<R, F, G, M>(bucket, work);
    else if constexpr (kWay == Way::kTensorCores)
      project_tensor_tile<R, G, M>(bucket, work);
    else
      project_tile<R, F, G, M>(bucket, work);
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
    constexpr Way kWay = kAnyRank ? Way::kAnyRank : Way::kVectors;
    if constexpr (R > 8) {
      constexpr auto kKernel = project_kernel<R, Way::kTensorCores, F, G, M>;
      bool tensor_cores = false;
      const Status status = runs_on_tensor_cores<kKernel>(&tensor_cores);
      if (status != 0) return status;
      if (tensor_cores)
        return launch<kKernel>(tiles, ProjectOnTensorCores<R, G, M>::kSharedBytes, stream,
                               Predecessor::kAnything, bucket, begin[kProjectTiles], tiles);
    }
    return launch<project_kernel<R, kWay, F, G, M>>(
        tiles, kAnyRank ? sizeof(Work) : kSharedBytes<R, F>, stream, Predecessor::kAnything, bucket,
        begin[kProjectTiles], tiles);
  }
};

}  // namespace

Status project(const Bucket& bucket, Stream stream) {
  return dispatch<LaunchProject>(bucket, stream);
}

}  // namespace powersgd::kernels::cuda
