// SPDX-License-Identifier: BSD-3-Clause
//
// project_transposed: M = G + residual_scale * (residual - p_local q_warm), residual = M,
// q_local = p_hat^T M, also written to the Q payload.
//
// It stands for project and back_project in a step that sends Q alone, but reads M once: a few rows
// of a block of columns (bands.h) are formed in the L1 cache and added to the partial q
// (partial_q.h) from there.
#include "kernels/cpu/form_m.h"
#include "kernels/cpu/pack.h"
#include "kernels/cpu/partial_q.h"
#include "kernels/cpu/with_storage.h"

namespace powersgd::kernels::cpu::POWERSGD_TARGET {

template <class G, class R, bool kFeedback>
POWERSGD_TILE_FUNCTION inline void add_transposed_tile(const Bucket& bucket, const Matrix& matrix,
                                                       const Tile& tile) {
  using F = ComputeOf<G>;
  F* partial = start_partial_q<F>(bucket, matrix, tile);
  PackedFactor<F> warm(matrix.q_warm, matrix.cols);
  const FormRows<G, R, kFeedback> rows{bucket, matrix, static_cast<const F*>(matrix.p_local), warm};
  ElementFlags<F> flags;
  const Region region{tile.row_begin, tile.row_end, tile.col_begin, tile.col_end};
  for_each_block(matrix, region, [&](const BandBlock& block) {
    for (int64_t row = block.row_begin; row < block.row_end; row += kRows) {
      alignas(64) F m[kRows * kBlockStride];
      rows.form(block, row, m, flags);
      add_to_partial_q(matrix, LoadBlock<F>{m}, row, std::min<int64_t>(kRows, block.row_end - row),
                       block.cols, partial + matrix.rank * block.col);
    }
  });
  flags_of(bucket, tile) = flags.template flags<R>();
}

inline void project_transposed(const Bucket& bucket, const ParallelFor& parallel_for) {
  with_storage_pair(bucket.gradient_dtype, bucket.residual_dtype, [&](auto g, auto r) {
    using G = decltype(g);
    using R = decltype(r);
    project_and_pack<G>(bucket, kBackProjectTiles, parallel_for, [&](const Tile& tile) {
      const Matrix& matrix = bucket.matrices[tile.item];
      if (matrix.memory == nullptr) {
        add_transposed_tile<G, G, false>(bucket, matrix, tile);
      } else {
        add_transposed_tile<G, R, true>(bucket, matrix, tile);
      }
    });
    sum_strips<ComputeOf<G>>(bucket, parallel_for, [](const Matrix&) { return false; });
  });
}

}  // namespace powersgd::kernels::cpu::POWERSGD_TARGET
