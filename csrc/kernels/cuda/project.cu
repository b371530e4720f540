// SPDX-License-Identifier: BSD-3-Clause
//
// project: M = S_new / S_old * (memory - p_hat q_local) + G, memory = M, P = M q_warm^T.
//
// This pass reads both the gradient and memory. A tile is a group of 64 rows, or of 32 above rank
// 4, by a range of columns, which the block takes in strips of 128. It has the strips of q_local
// and q_warm in shared memory, and copies the next while it uses them:
//   1. A lane loads its part of the gradient and of memory, four columns of a few rows. The first
//      loads go ahead of all else that the block prepares.
//   2. It adds the gradient, subtracts p_hat q_local and stores M.
//   3. It multiplies M by q_warm, in float or in bfloat16 (project_tile.cuh).
// When the columns are done:
//   4. The lanes' or warps' sums are added. They are a part of P, or a partial one where the matrix
//      has several column ranges.
//   5. The last block of a row group adds the partial ones in their order. The last block of all
//      joins the flags of the tiles.
// P is computed from M as memory holds it, rounded. Error feedback then makes up for the rounding
// too.
#include "kernels/cuda/dispatch.cuh"
#include "kernels/cuda/project_tile.cuh"

namespace powersgd::kernels::cuda {
namespace {

// Registers are traded for blocks in flight.
enum class Way { kFloat, kBfloat16 };
template <int R, Way kWay>
constexpr int kBlocksPerProcessor = kWay == Way::kFloat && R > 8 ? 1 : 2;

template <int R, Way kWay>
using ProductsOf =
    std::conditional_t<kWay == Way::kBfloat16, Bfloat16Products<R>, FloatProducts<R>>;

// M alone, from a memory from which nothing is to be subtracted.
template <typename G, typename M>
__device__ void form_tile(const Bucket& bucket, Work* work) {
  const auto rows = rows_of<kLoadedRows, G, M>(bucket, *work, warp_id() * kLoadedRows);
  share_residual_scale(bucket, work);
  const int width =
      rows.count > 0 ? static_cast<int>(work->tile.col_end - work->tile.col_begin) : 0;
  for (int col = lane_id() * 4; col < width; col += kStrip) {
    const LaneColumns columns = rows.columns(col, width);
    StoredElements<G, M> stored;
    stored.load(rows, 0, col, columns);
    float m[kLoadedRows][4];
    add_gradient(rows, stored, m, &work->non_finite);
    store_m(rows, 0, col, columns, m);
  }
}

template <int R, Way kWay, typename G, typename M>
__global__ void __launch_bounds__(kThreads, (kBlocksPerProcessor<R, kWay>))
    project_kernel(Bucket bucket, const Tile* tiles, int64_t count) {
  Work* const work = begin_work(bucket, tiles);
  if (work->tile.kind == TileKind::kRawSegment) {
    pack_raw<G>(bucket, work);
  } else {
    if constexpr (R == kNoProducts)
      form_tile<G, M>(bucket, work);
    else
      ProjectTile<ProductsOf<R, kWay>, G, M>(bucket, work).run(bucket);
  }
  add_flag(bucket, *work);
  // The last block of a row group arrives for all of them. A raw segment's blocks have no group.
  if (!add_column_ranges(bucket, *work)) return;
  if (is_last_to_arrive(&bucket.counters[kProjectArrivals], static_cast<uint64_t>(count),
                        static_cast<uint64_t>(work->tile.parts)))
    write_flags(bucket);
}

// A bucket without tiles.
__global__ void __launch_bounds__(kThreads) write_flags_kernel(Bucket bucket) {
  write_flags(bucket);
}

struct LaunchProject {
  template <int R, typename G, typename M>
  static Status run(const Bucket& bucket, Stream stream) {
    if constexpr (R == kNoProducts) {
      return launch_way<R, Way::kFloat, G, M>(bucket, sizeof(Work), stream);
    } else {
      if constexpr (R > 8) {
        bool bfloat16 = false;
        const Status status = takes_bfloat16_products(bucket, &bfloat16);
        if (status != 0) return status;
        if (bfloat16) return launch_tile<R, Way::kBfloat16, G, M>(bucket, stream);
      }
      return launch_tile<R, Way::kFloat, G, M>(bucket, stream);
    }
  }

 private:
  template <int R, Way kWay, typename G, typename M>
  static Status launch_tile(const Bucket& bucket, Stream stream) {
    return launch_way<R, kWay, G, M>(bucket, ProjectTile<ProductsOf<R, kWay>, G, M>::kSharedBytes,
                                     stream);
  }

  template <int R, Way kWay, typename G, typename M>
  static Status launch_way(const Bucket& bucket, size_t shared_bytes, Stream stream) {
    const int64_t* begin = bucket.tile_list_begin.data();
    const int64_t count = begin[kProjectTiles + 1] - begin[kProjectTiles];
    if (count == 0) return launch<write_flags_kernel>(1, 0, stream, Predecessor::kAnything, bucket);
    return launch<project_kernel<R, kWay, G, M>>(count, shared_bytes, stream,
                                                 Predecessor::kAnything, bucket,
                                                 bucket.tiles + begin[kProjectTiles], count);
  }
};

}  // namespace

Status project(const Bucket& bucket, Stream stream) {
  return dispatch<LaunchProject>(bucket, stream);
}

}  // namespace powersgd::kernels::cuda
