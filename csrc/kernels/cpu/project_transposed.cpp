// SPDX-License-Identifier: BSD-3-Clause
//
// project_transposed: M = G + residual_scale * (memory - p_local q_warm), memory = M,
// q_local = p_hat^T M, also written to the Q payload.
//
// It is project and back_project of a step that sends Q alone, but reads M once: a few rows of a
// block of columns (bands.h) are formed in the L1 cache and added to the partial q (partial_q.h)
// from there.
#include "kernels/cpu/form_m.h"
#include "kernels/cpu/pack.h"
#include "kernels/cpu/partial_q.h"
#include "kernels/cpu/stages.h"

namespace powersgd::kernels::cpu {
namespace {

template <class G, class R, bool kFeedback>
struct ProjectTransposedTile {
  using F = ComputeOf<G>;

  const Bucket& bucket;
  const Matrix& matrix;
  const Tile& tile;

  template <class Arch>
  POWERSGD_INLINE void run() const {
    F* partial = start_partial_q<F>(bucket, matrix, tile);
    PackedFactor<F> warm(matrix.q_warm, matrix.cols);
    const FormRows<G, R, kFeedback> rows{bucket, matrix, static_cast<const F*>(matrix.p_local),
                                         warm};
    ElementFlags<Arch, F> seen;
    const Walk walk{tile.row_begin, tile.row_end, tile.col_begin, tile.col_end};
    for_each_block(matrix, walk, [&](const BandBlock& block) POWERSGD_INLINE_LAMBDA {
      for (int64_t row = block.row_begin; row < block.row_end; row += kRows) {
        alignas(64) F m[kRows * kBlockStride];
        rows.template form<Arch>(block, row, m, seen);
        add_to_partial_q<Arch>(matrix, LoadBlock<F>{m}, row,
                               std::min<int64_t>(kRows, block.row_end - row), block.cols,
                               partial + matrix.rank * block.col);
      }
    });
    flags_of(bucket, tile) = seen.template flags<R>();
  }
};

template <class G, class R>
void project_transposed_tile(Isa isa, const Bucket& bucket, const Tile& tile) {
  const Matrix& matrix = bucket.matrices[tile.item];
  if (matrix.memory == nullptr) {
    run_on(isa, ProjectTransposedTile<G, G, false>{bucket, matrix, tile});
  } else {
    run_on(isa, ProjectTransposedTile<G, R, true>{bucket, matrix, tile});
  }
}

}  // namespace

void project_transposed(Isa isa, const Bucket& bucket, const ParallelFor& parallel_for) {
  with_storage_pair(bucket.gradient_dtype, bucket.residual_dtype, [&](auto g, auto r) {
    using G = decltype(g);
    using R = decltype(r);
    project_and_pack<G>(isa, bucket, kBackProjectTiles, parallel_for, [&](const Tile& tile) {
      project_transposed_tile<G, R>(isa, bucket, tile);
    });
    sum_strips<ComputeOf<G>>(isa, bucket, parallel_for, [](const Matrix&) { return false; });
  });
}

void project_transposed(const Bucket& bucket, const ParallelFor& parallel_for) {
  project_transposed(best_isa(), bucket, parallel_for);
}

}  // namespace powersgd::kernels::cpu
