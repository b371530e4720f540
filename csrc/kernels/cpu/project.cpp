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
#include "kernels/cpu/pack.h"
#include "kernels/cpu/project_tile.h"

namespace powersgd::kernels::cpu {
namespace {

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

}  // namespace

void project(Isa isa, const Bucket& bucket, const ParallelFor& parallel_for) {
  with_storage_pair(bucket.gradient_dtype, bucket.residual_dtype, [&](auto g, auto r) {
    using G = decltype(g);
    using R = decltype(r);
    project_and_pack<G>(isa, bucket, kMatrixTiles, parallel_for,
                        [&](const Tile& tile) { project_matrix_tile<G, R>(isa, bucket, tile); });
  });
}

void project(const Bucket& bucket, const ParallelFor& parallel_for) {
  project(best_isa(), bucket, parallel_for);
}

}  // namespace powersgd::kernels::cpu
