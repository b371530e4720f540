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
#include "kernels/cpu/form_m.h"
#include "kernels/cpu/pack.h"
#include "kernels/cpu/stages.h"

namespace powersgd::kernels::cpu {
namespace {

// There are two kernels: one row at a time for low ranks, and kRows rows for any rank.

// The arguments of both kernels.
template <class G, class R, bool kFeedback>
struct ProjectArguments {
  using F = ComputeOf<G>;

  const Bucket& bucket;
  const Matrix& matrix;
  const Tile& tile;

  Walk walk() const { return {tile.row_begin, tile.row_end, 0, matrix.cols}; }
  const F* p_hat() const { return static_cast<const F*>(matrix.p_hat); }
  F* p() const { return elements<F>(bucket.p_payload, matrix.p_offset); }

  template <class Arch>
  POWERSGD_INLINE void finish(const ElementFlags<Arch, F>& seen) const {
    flags_of(bucket, tile) = seen.template flags<R>();
  }

  // Blocks add to P what they have to add.
  POWERSGD_INLINE void clear_p() const {
    std::fill(p() + tile.row_begin * matrix.rank, p() + tile.row_end * matrix.rank, F{0});
  }
};

// Up to kRank rows of the factors, everything else in registers: arithmetic hides behind memory.
template <class G, class R, int kRank>
struct ProjectLowRank {
  using F = ComputeOf<G>;

  ProjectArguments<G, R, true> arguments;

  template <class Arch>
  POWERSGD_INLINE void run() const {
    const Matrix& matrix = arguments.matrix;
    PackedFactor<F, kRank> local(matrix.q_local, matrix.cols);
    PackedFactor<F, kRank> warm(matrix.q_warm, matrix.cols);
    ElementFlags<Arch, F> seen;
    arguments.clear_p();
    for_each_block(matrix, arguments.walk(), [&](const BandBlock& block) POWERSGD_INLINE_LAMBDA {
      local.template pack<Arch>(0, matrix.rank, block.col, block.cols);
      warm.template pack<Arch>(0, matrix.rank, block.col, block.cols);
      for (int64_t row = block.row_begin; row < block.row_end; ++row) {
        project_row<Arch>(block, row, local.data(), warm.data(), seen);
      }
    });
    arguments.template finish<Arch>(seen);
  }

  template <class Arch>
  POWERSGD_INLINE void project_row(const BandBlock& block, int64_t row, const F* local,
                                   const F* warm, ElementFlags<Arch, F>& seen) const {
    const Matrix& matrix = arguments.matrix;
    const Source<Arch, G, R, true> source(arguments.bucket, matrix);
    const int64_t offset = row * matrix.cols + block.col;
    const int64_t ahead = block.ahead(row, matrix.cols);
    Vector<Arch, F> p_hat[kRank];  // times residual_scale
    Vector<Arch, F> sum[kRank] = {};
    POWERSGD_UNROLL
    for (int k = 0; k < kRank; ++k) {
      const F value = k < matrix.rank ? arguments.p_hat()[row * matrix.rank + k] : F{0};
      p_hat[k] = broadcast<Arch>(source.residual_scale * value);
    }
    for_each_vector<Arch, F>(block.cols, [&](int64_t j, int64_t count) POWERSGD_INLINE_LAMBDA {
      source.prefetch_inputs(ahead + j);
      Vector<Arch, F> m = source.load_sum(offset + j, count, seen);
      POWERSGD_UNROLL
      for (int k = 0; k < kRank; ++k) m -= p_hat[k] * load<Arch>(local + k * kBlockStride + j);
      m = source.keep(offset + j, count, m, seen);
      POWERSGD_UNROLL
      for (int k = 0; k < kRank; ++k) sum[k] += m * load<Arch>(warm + k * kBlockStride + j);
    });
    F sums[kRank];
    sums_of_lanes<Arch, F, kRank>(sum, sums);
    F* p = arguments.p() + row * matrix.rank;
    for (int64_t k = 0; k < matrix.rank; ++k) p[k] += sums[k];
  }
};

// In kRows rows.
template <class G, class R, bool kFeedback>
struct ProjectAnyRank {
  using F = ComputeOf<G>;

  ProjectArguments<G, R, kFeedback> arguments;

  template <class Arch>
  POWERSGD_INLINE void run() const {
    const Matrix& matrix = arguments.matrix;
    PackedFactor<F> local(matrix.q_local, matrix.cols);
    PackedFactor<F> warm(matrix.q_warm, matrix.cols);
    const FormRows<G, R, kFeedback> rows{arguments.bucket, matrix, arguments.p_hat(), local};
    ElementFlags<Arch, F> seen;
    arguments.clear_p();
    for_each_block(matrix, arguments.walk(), [&](const BandBlock& block) POWERSGD_INLINE_LAMBDA {
      for (int64_t row = block.row_begin; row < block.row_end; row += kRows) {
        alignas(64) F m[kRows * kBlockStride];
        rows.template form<Arch>(block, row, m, seen);
        multiply_warm<Arch>(block, row, m, warm);
      }
    });
    arguments.template finish<Arch>(seen);
  }

  // P += m q_warm^T
  template <class Arch>
  POWERSGD_INLINE void multiply_warm(const BandBlock& block, int64_t row, const F* m,
                                     PackedFactor<F>& warm) const {
    const int64_t rank = arguments.matrix.rank;
    const int64_t rows = std::min<int64_t>(kRows, block.row_end - row);
    F* p = arguments.p() + row * rank;
    for (int64_t k = 0; k < rank; k += kPackedRank) {
      const int64_t count = std::min(kPackedRank, rank - k);
      warm.template pack<Arch>(k, count, block.col, block.cols);
      dot<Arch, F>(m, warm.data(), round_up(block.cols, kPad), count, rows, p + k, rank);
    }
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
