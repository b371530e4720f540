// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "kernels/cpu/blocking/finite_check.h"
#include "kernels/cpu/blocking/tiles.h"
#include "kernels/cpu/simd/convert.h"
#include "kernels/shared/steps.h"

// project puts raw segments, uses and the non-finite count into the P payload, alongside P.
namespace powersgd::kernels::cpu::POWERSGD_TARGET {

// Copies a tile of a raw segment, which travels as it is.
template <class G>
POWERSGD_TILE_FUNCTION inline void copy_raw_tile(const Bucket& bucket, const Tile& tile) {
  const RawSegment& raw = bucket.raw_segments[tile.item];
  const G* gradient = elements<G>(bucket.gradient, raw.gradient_offset) + tile.col_begin;
  float* payload = elements<float>(bucket.p_payload, raw.p_offset) + tile.col_begin;
  FiniteCheck check;
  for_each_vector(tile.col_end - tile.col_begin, [&](int64_t j, int64_t count) {
    const Floats g = load_first(gradient + j, count);
    check.add(g);
    store_first(payload + j, count, g);
  });
  non_finite_flag(bucket, tile) = check.passed() ? 0 : 1;
}

// Writes for each matrix whether this rank has used it.
inline void write_uses(const Bucket& bucket) {
  for (int32_t i = 0; i < bucket.num_matrices; ++i) {
    const int64_t offset = bucket.matrices[i].use_offset;
    if (offset >= 0)
      *elements<float>(bucket.p_payload, offset) = static_cast<float>(use_of(bucket, i));
  }
}

// Notes the new units of memory.
inline void note_units(const Bucket& bucket) {
  for (int32_t i = 0; i < bucket.num_matrices; ++i) {
    *bucket.matrices[i].memory_units = units_of(bucket);
  }
}

// Calls on_matrix(tile), which sets the tile's flag, for each tile of a matrix, and fills the P
// payload.
template <class G, class OnMatrix>
inline void project_and_pack(const Bucket& bucket, const ParallelFor& parallel_for,
                             const OnMatrix& on_matrix) {
  int32_t non_finite = 0;
  for_each_matrix_and_raw_tile(bucket, parallel_for, on_matrix,
                               [&](const Tile& tile) { copy_raw_tile<G>(bucket, tile); });
  for (const Tile* tile = bucket.tiles + bucket.tile_list_begin[kMatrixTiles];
       tile < bucket.tiles + bucket.tile_list_begin[kRawTiles + 1]; ++tile) {
    non_finite |= non_finite_flag(bucket, *tile);
  }
  *elements<float>(bucket.p_payload, bucket.p_numel - 1) = static_cast<float>(non_finite);
  bucket.state->step = begun_step(bucket);
  write_uses(bucket);
  note_units(bucket);
}

}  // namespace powersgd::kernels::cpu::POWERSGD_TARGET
