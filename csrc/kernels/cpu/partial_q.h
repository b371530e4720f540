// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>

#include "kernels/cpu/blocking/products.h"
#include "kernels/cpu/blocking/tiles.h"

// back_project adds q up in two passes. First, a tile owns a range of rows and a strip of columns,
// and computes a partial q. Then the partial q of a strip are added in the order of the rows, so
// the sum does not depend on which thread computed which part.
namespace powersgd::kernels::cpu::POWERSGD_TARGET {

// Returns a tile's partial q, cleared: a block of columns [col, ...) is at rank * col, its rows
// kBlockCols apart.
inline float* start_partial_q(const Bucket& bucket, const Matrix& matrix, const Tile& tile) {
  const int64_t part = tile.row_begin / back_project_rows(matrix);
  float* partial = slot_pointer<float>(bucket, tile.slot) + part * partial_q_numel(matrix);
  std::fill(partial + matrix.rank * tile.col_begin,
            partial + matrix.rank * round_up(tile.col_end, kBlockCols), 0.0f);
  return partial;
}

// q += p_hat^T source over up to kRows rows from `row` on, into a block of a partial q.
template <class Source>
inline void add_to_partial_q(const Matrix& matrix, const Source& source, int64_t row, int64_t rows,
                             int64_t cols, float* block) {
  const float* p_hat = static_cast<const float*>(matrix.p_hat) + row * matrix.rank;
  alignas(64) float left[kRows * kPackedRank];
  for (int64_t k = 0; k < matrix.rank; k += kPackedRank) {
    const int64_t count = std::min(kPackedRank, matrix.rank - k);
    pack_rows(p_hat + k, matrix.rank, rows, count, 1.0f, left);
    accumulate<Rounding::kFastest>(left, source, count, cols, block + k * kBlockCols, kBlockCols);
  }
}

// Adds kPad elements of the first `parts` partial q, which are `stride` elements apart.
inline void add_parts(const float* partial, int64_t parts, int64_t stride, float* sums) {
  constexpr int64_t kLane = kLanes<float>;
  Floats sum[kPad / kLane] = {};
  for (int64_t part = 0; part < parts; ++part) {
    POWERSGD_UNROLL
    for (int64_t i = 0; i < kPad / kLane; ++i) {
      sum[i] += load(partial + part * stride + i * kLane);
    }
  }
  POWERSGD_UNROLL
  for (int64_t i = 0; i < kPad / kLane; ++i) store(sums + i * kLane, sum[i]);
}

// q of a strip: the sum of the first `parts` of its partial q, to q_local and the Q payload.
POWERSGD_TILE_FUNCTION inline void sum_strip(const Bucket& bucket, const Matrix& matrix,
                                             const Tile& tile, int64_t parts) {
  const float* partial = slot_pointer<float>(bucket, tile.slot);
  float* payload = elements<float>(bucket.q_payload, matrix.q_offset);
  for (int64_t k = 0; k < matrix.rank; ++k) {
    for (int64_t j = tile.col_begin; j < tile.col_end; j += kPad) {
      const int64_t count = std::min(kPad, tile.col_end - j);
      const int64_t block = j / kBlockCols * kBlockCols;
      float sums[kPad];
      add_parts(partial + matrix.rank * block + k * kBlockCols + j - block, parts,
                partial_q_numel(matrix), sums);
      const int64_t target = k * matrix.cols + j;
      std::copy_n(sums, count, payload + target);
      std::copy_n(sums, count, static_cast<float*>(matrix.q_local) + target);
    }
  }
}

// Runs the second pass. q is 0 if the step is skipped or the matrix is out of use, so its residual
// stays.
inline void sum_strips(const Bucket& bucket, const ParallelFor& parallel_for) {
  for_each_tile(bucket, kStripTiles, parallel_for, [&](const Tile& tile) {
    const Matrix& matrix = bucket.matrices[tile.item];
    const bool is_zero = bucket.state->skipped != 0 || out_of_use(bucket, matrix);
    const int64_t parts = is_zero ? 0 : ceil_div(matrix.rows, back_project_rows(matrix));
    sum_strip(bucket, matrix, tile, parts);
  });
}

}  // namespace powersgd::kernels::cpu::POWERSGD_TARGET
