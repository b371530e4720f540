// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <type_traits>

#include "kernels/cpu/blocking/element_flags.h"
#include "kernels/cpu/blocking/tiles.h"
#include "kernels/cpu/simd/convert.h"
#include "kernels/shared/step_count.h"

// project puts raw segments, activities and the non-finite count into the P payload, beside P.
namespace powersgd::kernels::cpu {

// A raw segment travels as it is.
template <class G>
struct CopyRawTile {
  using F = ComputeOf<G>;

  const Bucket& bucket;
  const RawSegment& raw;
  const Tile& tile;

  template <class Arch>
  POWERSGD_INLINE void run() const {
    const G* gradient = elements<G>(bucket.gradient, raw.gradient_offset) + tile.col_begin;
    F* payload = elements<F>(bucket.p_payload, raw.p_offset) + tile.col_begin;
    ElementFlags<Arch, F> seen;
    for_each_vector<Arch, F>(tile.col_end - tile.col_begin,
                             [&](int64_t j, int64_t count) POWERSGD_INLINE_LAMBDA {
                               const Vector<Arch, F> g = load_first<Arch>(gradient + j, count);
                               seen.examine(g);
                               store_first<Arch>(payload + j, count, g);
                             });
    flags_of(bucket, tile) = seen.template flags<F>();
  }
};

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

// on_matrix(tile) for each tile of `matrix_list`, which sets the tile's flags; and all that is
// packed.
template <class G, class OnMatrix>
void project_and_pack(Isa isa, const Bucket& bucket, size_t matrix_list,
                      const ParallelFor& parallel_for, const OnMatrix& on_matrix) {
  int32_t flags = 0;
  for_each_matrix_and_raw_tile(bucket, matrix_list, parallel_for, on_matrix, [&](const Tile& tile) {
    run_on(isa, CopyRawTile<G>{bucket, bucket.raw_segments[tile.item], tile});
  });
  for (const size_t list : {matrix_list, size_t{kRawTiles}}) {
    for (const Tile* tile = bucket.tiles + bucket.tile_list_begin[list];
         tile < bucket.tiles + bucket.tile_list_begin[list + 1]; ++tile) {
      flags |= flags_of(bucket, *tile);
    }
  }
  elements<ComputeOf<G>>(bucket.p_payload, bucket.p_numel - 1)[0] =
      (flags & kNonFinite) != 0 ? 1 : 0;
  if ((flags & kSaturated) != 0) count_step(bucket, &StepCounts::saturated);
  write_activities<G>(bucket);
}

}  // namespace powersgd::kernels::cpu
