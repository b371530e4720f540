// SPDX-License-Identifier: BSD-3-Clause
//
// project: M = G + residual_scale * (residual - p_hat q_local), residual = M, P = M q_warm^T.
//
// It is the one pass that reads both the gradient and the residual. A tile is a range of rows. For
// a block of columns (bands.h) and a few of its rows,
//   1. p_hat q_local is multiplied out,
//   2. it becomes M, the only step that loads and stores the types of gradient and residual,
//   3. M is multiplied with q_warm.
// P is computed from M as the residual holds it, rounded, so error feedback makes up for the
// rounding. There are two kernels: one row at a time at low ranks, and kRows rows at any rank.
#include "kernels/cpu/form_m.h"
#include "kernels/cpu/pack.h"
#include "kernels/cpu/with_storage.h"
#include "kernels/shared/steps.h"

namespace powersgd::kernels::cpu::POWERSGD_TARGET {

// The tile that a kernel works on, and its P.
struct ProjectTile {
  const Bucket& bucket;
  const Matrix& matrix;
  const Tile& tile;
  float residual_scale;

  Region region() const { return {tile.row_begin, tile.row_end, 0, matrix.cols}; }
  const float* p_hat() const { return static_cast<const float*>(matrix.p_hat); }
  float* p() const { return elements<float>(bucket.p_payload, matrix.p_offset); }

  // Clears P, to which blocks then add.
  void clear_p() const {
    std::fill(p() + tile.row_begin * matrix.rank, p() + tile.row_end * matrix.rank, 0.0f);
  }

  void finish(const FiniteCheck& check) const {
    non_finite_flag(bucket, tile) = check.passed() ? 0 : 1;
  }
};

// Handles one row of a block with up to kRank rows of the factors. Everything else is in registers,
// so arithmetic hides behind memory.
template <class G, class R, int kRank>
inline void project_row(const ProjectTile& arguments, const BandBlock& block, int64_t row,
                        const float* local, const float* warm, FiniteCheck& check) {
  const Matrix& matrix = arguments.matrix;
  const MatrixElements<G, R, true> source(arguments.bucket, matrix, arguments.residual_scale);
  const int64_t offset = row * matrix.cols + block.col;
  const int64_t ahead = block.ahead(row, matrix.cols);
  Floats p_hat[kRank];  // times -residual_scale
  Floats sum[kRank] = {};
  POWERSGD_UNROLL
  for (int k = 0; k < kRank; ++k) {
    const float value = k < matrix.rank ? arguments.p_hat()[row * matrix.rank + k] : 0.0f;
    p_hat[k] = broadcast(-(source.residual_scale * value));
  }
  // At rank 1 memory is the bottleneck, and two vectors per turn are about 6 % slower.
  constexpr int kTurn = kRank == 1 ? 1 : 2;
  for_each_vector<kTurn>(block.cols, [&](int64_t j, int64_t count) {
    source.prefetch_inputs(ahead + j);
    Floats m = source.load_sum(offset + j, count, check);
    POWERSGD_UNROLL
    for (int k = 0; k < kRank; ++k)
      m = multiply_add(p_hat[k], load(local + k * kBlockStride + j), m);
    m = source.store_m(offset + j, count, m);
    POWERSGD_UNROLL
    for (int k = 0; k < kRank; ++k) {
      sum[k] = multiply_add(m, load(warm + k * kBlockStride + j), sum[k]);
    }
  });
  float sums[kRank];
  sums_of_lanes<kRank>(sum, sums);
  float* p = arguments.p() + row * matrix.rank;
  const int64_t rank = std::min<int64_t>(matrix.rank, kRank);
  for (int64_t k = 0; k < rank; ++k) p[k] += sums[k];
}

template <class G, class R, int kRank>
POWERSGD_TILE_FUNCTION inline void project_low_rank(const ProjectTile& arguments) {
  const Matrix& matrix = arguments.matrix;
  PackedFactor<kRank> local(matrix.q_local, matrix.cols);
  PackedFactor<kRank> warm(matrix.q_warm, matrix.cols);
  FiniteCheck check;
  arguments.clear_p();
  for_each_block(matrix, arguments.region(), [&](const BandBlock& block) {
    local.pack(0, matrix.rank, block.col, block.cols);
    warm.pack(0, matrix.rank, block.col, block.cols);
    for (int64_t row = block.row_begin; row < block.row_end; ++row) {
      project_row<G, R, kRank>(arguments, block, row, local.data(), warm.data(), check);
    }
  });
  arguments.finish(check);
}

// P += m q_warm^T, of kRows rows of a block.
inline void multiply_warm(const ProjectTile& arguments, const BandBlock& block, int64_t row,
                          const float* m, PackedFactor<>& warm) {
  const int64_t rank = arguments.matrix.rank;
  const int64_t rows = std::min<int64_t>(kRows, block.row_end - row);
  float* p = arguments.p() + row * rank;
  for (int64_t k = 0; k < rank; k += kPackedRank) {
    const int64_t count = std::min(kPackedRank, rank - k);
    warm.pack(k, count, block.col, block.cols);
    dot(m, warm.data(), round_up(block.cols, kPad), count, rows, p + k, rank);
  }
}

template <class G, class R, bool kFeedback>
POWERSGD_TILE_FUNCTION inline void project_any_rank(const ProjectTile& arguments) {
  const Matrix& matrix = arguments.matrix;
  PackedFactor<> local(matrix.q_local, matrix.cols);
  PackedFactor<> warm(matrix.q_warm, matrix.cols);
  const FormRows<G, R, kFeedback> rows{arguments.bucket, matrix, arguments.p_hat(), local,
                                       arguments.residual_scale};
  FiniteCheck check;
  arguments.clear_p();
  for_each_block(matrix, arguments.region(), [&](const BandBlock& block) {
    for (int64_t row = block.row_begin; row < block.row_end; row += kRows) {
      alignas(64) float m[kRows * kBlockStride];
      rows.form(block, row, m, check);
      multiply_warm(arguments, block, row, m, warm);
    }
  });
  arguments.finish(check);
}

template <class G, class R>
inline void project_tile(const Bucket& bucket, const Tile& tile) {
  const Matrix& matrix = bucket.matrices[tile.item];
  const ProjectTile arguments{bucket, matrix, tile,
                              static_cast<float>(residual_scale(bucket, matrix))};
  if (matrix.memory == nullptr) {
    project_any_rank<G, G, false>(arguments);
  } else if (matrix.rank > 8 || matrix.rank == 0) {
    project_any_rank<G, R, true>(arguments);
  } else if (matrix.rank > 4) {
    project_low_rank<G, R, 8>(arguments);
  } else if (matrix.rank > 2) {
    project_low_rank<G, R, 4>(arguments);
  } else if (matrix.rank == 2) {
    project_low_rank<G, R, 2>(arguments);
  } else {
    project_low_rank<G, R, 1>(arguments);
  }
}

inline void project(const Bucket& bucket, const ParallelFor& parallel_for) {
  with_storage_pair(bucket.gradient_dtype, bucket.residual_dtype, [&](auto g, auto r) {
    using G = decltype(g);
    using R = decltype(r);
    project_and_pack<G>(bucket, parallel_for,
                        [&](const Tile& tile) { project_tile<G, R>(bucket, tile); });
  });
}

}  // namespace powersgd::kernels::cpu::POWERSGD_TARGET
