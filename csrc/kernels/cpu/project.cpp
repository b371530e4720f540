// SPDX-License-Identifier: BSD-3-Clause
//
// project: M = G + residual_scale * (memory - p_hat q_local), memory = M, P = M q_warm^T.
//
// The one pass that reads both the gradient and the memory. Tiles are ranges of rows; for a block
// of columns (bands.h) of a few of them,
//   1. p_hat q_local is multiplied out,
//   2. it becomes M, the only step that loads and stores the types of gradient and memory,
//   3. M is multiplied with q_warm.
// P is computed from M as memory holds it, rounded: error feedback then makes up for the rounding.
#include "project_tile.h"

namespace powersgd::kernels::cpu {
namespace {

// A raw segment travels as it is.
template <class G>
struct CopyRawTile {
  using F = ComputeOf<G>;

  const Bucket& bucket;
  const RawSegment& raw;
  const Tile& tile;

  template <class Arch>
  POWERSGD_INLINE void run() const {
    constexpr int64_t kLane = kLanes<Arch, F>;
    const G* gradient = elements<G>(bucket.gradient, raw.gradient_offset);
    F* payload = elements<F>(bucket.p_payload, raw.p_offset);
    Vector<Arch, F> poison = {};
    int64_t j = tile.col_begin;
    for (; j + kLane <= tile.col_end; j += kLane) {
      const Vector<Arch, F> g = load_as<Arch>(gradient + j);
      poison += g - g;
      store<Arch>(payload + j, g);
    }
    if (j < tile.col_end) {
      const Padded<Arch, G> last(gradient + j, tile.col_end - j);
      const Vector<Arch, F> g = load_as<Arch>(last.data);
      poison += g - g;
      F converted[kLane];
      store<Arch>(converted, g);
      std::copy_n(converted, tile.col_end - j, payload + j);
    }
    *slot_pointer<int32_t>(bucket, tile.slot) = !(sum_of_lanes<Arch, F>(poison) == 0);
  }
};

template <class G, class R>
void project_matrix_tile(Isa isa, const Bucket& bucket, const Tile& tile) {
  const Matrix& matrix = bucket.matrices[tile.item];
  if (matrix.memory == nullptr) {
    run_on(isa, ProjectAnyRank<G, G, false>{{bucket, matrix, tile}});
  } else if (matrix.rank > 8 || matrix.rank == 0) {
    run_on(isa, ProjectAnyRank<G, R, true>{{bucket, matrix, tile}});
  } else if (matrix.rank > 4) {
    run_on(isa, ProjectLowRank<G, R, 8>{{bucket, matrix, tile}});
  } else if (matrix.rank > 2) {
    run_on(isa, ProjectLowRank<G, R, 4>{{bucket, matrix, tile}});
  } else if (matrix.rank == 2) {
    run_on(isa, ProjectLowRank<G, R, 2>{{bucket, matrix, tile}});
  } else {
    run_on(isa, ProjectLowRank<G, R, 1>{{bucket, matrix, tile}});
  }
}

template <class G>
bool is_zero(G element) {
  if constexpr (std::is_floating_point_v<G>) {
    return element == 0;
  } else {
    return (element.bits & 0x7FFF) == 0;  // of either sign
  }
}

// The search for a non-zero element ends at the first, so that only a gradient that is zero is
// read.
template <class G>
void write_activities(const Bucket& bucket) {
  for (int32_t i = 0; i < bucket.num_matrices; ++i) {
    const Matrix& matrix = bucket.matrices[i];
    if (matrix.active_offset < 0) continue;
    const G* gradient = elements<G>(bucket.gradient, matrix.gradient_offset);
    const G* end = gradient + matrix.rows * matrix.cols;
    const bool active = std::any_of(gradient, end, [](G element) { return !is_zero(element); });
    elements<ComputeOf<G>>(bucket.p_payload, matrix.active_offset)[0] = active ? 1 : 0;
  }
}

template <class G, class R>
void project_tiles(Isa isa, const Bucket& bucket, const ParallelFor& parallel_for) {
  using F = ComputeOf<G>;
  for_each_matrix_and_raw_tile(
      bucket, parallel_for, [&](const Tile& tile) { project_matrix_tile<G, R>(isa, bucket, tile); },
      [&](const Tile& tile) {
        run_on(isa, CopyRawTile<G>{bucket, bucket.raw_segments[tile.item], tile});
      });
  bool poisoned = false;
  for (const Tile* tile = bucket.tiles + bucket.tile_list_begin[kMatrixTiles];
       tile < bucket.tiles + bucket.tile_list_begin[kRawTiles + 1]; ++tile) {
    poisoned |= *slot_pointer<int32_t>(bucket, tile->slot) != 0;
  }
  elements<F>(bucket.p_payload, bucket.p_numel - 1)[0] = poisoned ? F{1} : F{0};
  write_activities<G>(bucket);
}

}  // namespace

void project(Isa isa, const Bucket& bucket, const ParallelFor& parallel_for) {
  with_storage_pair(bucket.gradient_dtype, bucket.residual_dtype, [&](auto g, auto r) {
    project_tiles<decltype(g), decltype(r)>(isa, bucket, parallel_for);
  });
}

void project(const Bucket& bucket, const ParallelFor& parallel_for) {
  project(best_isa(), bucket, parallel_for);
}

}  // namespace powersgd::kernels::cpu
