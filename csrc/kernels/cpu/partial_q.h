// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>

#include "kernels/cpu/blocking/products.h"
#include "kernels/cpu/blocking/tiles.h"

// back_project adds q up in two passes. A tile owns a range of rows and a strip of columns and has
// a partial q. The partial q of a strip are then added in the order of the rows, so that the sum
// does not depend on who computed what.
namespace powersgd::kernels::cpu {

// A tile's partial q, cleared: a block of columns [col, ...) is at rank * col, its rows kBlockCols
// apart.
template <class F>
F* start_partial_q(const Bucket& bucket, const Matrix& matrix, const Tile& tile) {
  const int64_t part = tile.row_begin / back_project_rows(matrix);
  F* partial = slot_pointer<F>(bucket, tile.slot) + part * partial_q_numel(matrix);
  std::fill(partial + matrix.rank * tile.col_begin,
            partial + matrix.rank * round_up(tile.col_end, kBlockCols), F{0});
  return partial;
}

// q += p_hat^T source over up to kRows rows from `row` on, into a block of a partial q.
template <class Arch, class F, class Source>
POWERSGD_INLINE void add_to_partial_q(const Matrix& matrix, const Source& source, int64_t row,
                                      int64_t rows, int64_t cols, F* block) {
  const F* p_hat = static_cast<const F*>(matrix.p_hat) + row * matrix.rank;
  alignas(64) F left[kRows * kPackedRank];
  for (int64_t k = 0; k < matrix.rank; k += kPackedRank) {
    const int64_t count = std::min(kPackedRank, matrix.rank - k);
    pack_rows(p_hat + k, matrix.rank, rows, count, F{1}, left);
    accumulate<Arch, F>(left, source, count, cols, block + k * kBlockCols, kBlockCols);
  }
}

// q of a strip: the sum of the first `parts` of its partial q, to q_local and the Q payload.
template <class F>
struct SumStrip {
  const Bucket& bucket;
  const Matrix& matrix;
  const Tile& tile;
  int64_t parts;

  template <class Arch>
  POWERSGD_INLINE void run() const {
    const F* partial = slot_pointer<F>(bucket, tile.slot);
    F* payload = elements<F>(bucket.q_payload, matrix.q_offset);
    for (int64_t k = 0; k < matrix.rank; ++k) {
      for (int64_t j = tile.col_begin; j < tile.col_end; j += kPad) {
        const int64_t count = std::min(kPad, tile.col_end - j);
        const int64_t block = j / kBlockCols * kBlockCols;
        F sums[kPad];
        add_parts<Arch>(partial + matrix.rank * block + k * kBlockCols + j - block, sums);
        const int64_t target = k * matrix.cols + j;
        std::copy_n(sums, count, payload + target);
        std::copy_n(sums, count, static_cast<F*>(matrix.q_local) + target);
      }
    }
  }

  // kPad elements.
  template <class Arch>
  POWERSGD_INLINE void add_parts(const F* partial, F* sums) const {
    constexpr int64_t kLane = kLanes<Arch, F>;
    Vector<Arch, F> sum[kPad / kLane] = {};
    for (int64_t part = 0; part < parts; ++part) {
      POWERSGD_UNROLL
      for (int64_t i = 0; i < kPad / kLane; ++i) {
        sum[i] += load<Arch, F>(partial + part * partial_q_numel(matrix) + i * kLane);
      }
    }
    POWERSGD_UNROLL
    for (int64_t i = 0; i < kPad / kLane; ++i) store<Arch, F>(sums + i * kLane, sum[i]);
  }
};

// The second pass. q is 0 where is_zero(matrix).
template <class F, class IsZero>
void sum_strips(Isa isa, const Bucket& bucket, const ParallelFor& parallel_for,
                const IsZero& is_zero) {
  for_each_tile(bucket, kStripTiles, parallel_for, [&](const Tile& tile) {
    const Matrix& matrix = bucket.matrices[tile.item];
    const int64_t parts = is_zero(matrix) ? 0 : ceil_div(matrix.rows, back_project_rows(matrix));
    run_on(isa, SumStrip<F>{bucket, matrix, tile, parts});
  });
}

}  // namespace powersgd::kernels::cpu
