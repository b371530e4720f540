// SPDX-License-Identifier: BSD-3-Clause
//
// reconstruct: G = (output_scale * p_hat) Q ; q_warm = the rows of Q at unit norm.
//
//   1. the norm of each row of Q, in double. A norm that is not finite skips the step.
//   2. G, block by block as in project, and the raw segments, which the reduction has already
//      summed.
//   3. q_warm.
// A skipped step changes nothing except G, which is NaN and so tells the caller.
//
// All ranks must get the same bits: each element of G is a sum in the order of k, and the norms are
// summed as factor_rows.h has it.
#include "kernels/cpu/simd/exact.h"

#include <cmath>
#include <limits>

#include "kernels/cpu/blocking/bands.h"
#include "kernels/cpu/blocking/products.h"
#include "kernels/cpu/factor_rows.h"
#include "kernels/cpu/simd/convert.h"
#include "kernels/cpu/stages.h"
#include "kernels/shared/step_count.h"

namespace powersgd::kernels::cpu {
namespace {

template <class F>
bool norms_are_finite(Isa isa, const Bucket& bucket, const ParallelFor& parallel_for) {
  for_each_tile(bucket, kFactorRowTiles, parallel_for, [&](const Tile& tile) {
    const Matrix& matrix = bucket.matrices[tile.item];
    const F* row = elements<F>(bucket.q_payload, matrix.q_offset) + tile.row_begin * matrix.cols;
    run_on(isa, SquareRow<F>{row, matrix.cols, slot_pointer<double>(bucket, tile.slot)});
  });
  const Tile* tile = bucket.tiles + bucket.tile_list_begin[kFactorRowTiles];
  const Tile* end = bucket.tiles + bucket.tile_list_begin[kFactorRowTiles + 1];
  return std::all_of(tile, end, [&](const Tile& row) {
    return std::isfinite(*slot_pointer<double>(bucket, row.slot));
  });
}

// q_warm keeps its row where Q has nothing to put there: the direction would be lost for good.
template <class F>
void update_warm_start(Isa isa, const Bucket& bucket, const ParallelFor& parallel_for) {
  for_each_tile(bucket, kFactorRowTiles, parallel_for, [&](const Tile& tile) {
    const Matrix& matrix = bucket.matrices[tile.item];
    const int64_t offset = tile.row_begin * matrix.cols;
    const double norm = std::sqrt(*slot_pointer<double>(bucket, tile.slot));
    if (norm == 0 || out_of_use<F>(bucket, matrix)) return;
    run_on(isa, ScaleRow<F>{elements<F>(bucket.q_payload, matrix.q_offset) + offset, matrix.cols,
                            1 / norm, static_cast<F*>(matrix.q_warm) + offset});
  });
}

// Writes what multiply hands over to G.
template <class G, bool kNonTemporal>
struct WriteRows {
  using F = ComputeOf<G>;

  G* gradient;
  int64_t row_stride;
  int64_t rows;
  int64_t cols;
  bool aligned;  // to cache lines

  template <class Arch, int kWidth>
  POWERSGD_INLINE void put(int64_t i, int64_t j, const Vector<Arch, F> (&product)[kWidth]) const {
    constexpr int64_t kLane = kLanes<Arch, F>;
    if (i >= rows || j >= cols) return;
    G* target = gradient + i * row_stride + j;
    if (j + kWidth * kLane > cols) {
      G converted[kWidth * kLane];
      store_all_as<Arch, false>(converted, product);
      std::copy_n(converted, cols - j, target);
    } else if (kNonTemporal && aligned) {
      store_all_as<Arch, true>(target, product);
    } else {
      store_all_as<Arch, false>(target, product);
    }
  }
};

// Elements of a band: nothing is asked for ahead, and the more rows a band has, the less packing
// counts.
constexpr int64_t kReconstructElements = int64_t{1} << 18;

template <class G, bool kNonTemporal>
struct ReconstructTile {
  using F = ComputeOf<G>;

  const Bucket& bucket;
  const Matrix& matrix;
  const Tile& tile;
  int64_t lead;  // columns in front of the first that is aligned to a cache line
  F scale = out_of_use<F>(bucket, matrix) ? F{0} : static_cast<F>(bucket.output_scale);

  template <class Arch>
  POWERSGD_INLINE void run() const {
    PackedFactor<F> q(elements<F>(bucket.q_payload, matrix.q_offset), matrix.cols);
    const Walk walk{tile.row_begin, tile.row_end, 0, matrix.cols, kReconstructElements, lead};
    for_each_block(matrix, walk, [&](const BandBlock& block) POWERSGD_INLINE_LAMBDA {
      for (int64_t row = block.row_begin; row < block.row_end; row += kRows) {
        write_rows<Arch>(block, row, q);
      }
    });
    if (kNonTemporal) stream_fence<Arch>();
  }

  template <class Arch>
  POWERSGD_INLINE void write_rows(const BandBlock& block, int64_t row, PackedFactor<F>& q) const {
    const int64_t rows = std::min<int64_t>(kRows, block.row_end - row);
    const int64_t cols = round_up(block.cols, kPad);
    const F* p_hat = static_cast<const F*>(matrix.p_hat) + row * matrix.rank;
    const int64_t offset = matrix.gradient_offset + row * matrix.cols + block.col;
    const WriteRows<G, kNonTemporal> write{elements<G>(bucket.gradient, offset), matrix.cols, rows,
                                           block.cols, block.index > 0 || lead == 0};
    alignas(64) F sums[kRows * kBlockStride];
    alignas(64) F left[kRows * kPackedRank];
    for (int64_t k = 0; k == 0 || k < matrix.rank; k += kPackedRank) {
      const int64_t count = std::min(kPackedRank, matrix.rank - k);
      const F* initial = k > 0 ? sums : nullptr;
      q.template pack<Arch>(k, count, block.col, block.cols);
      pack_rows(p_hat + k, matrix.rank, rows, count, scale, left);
      if (k + count < matrix.rank) {
        multiply<Arch, F, true>(left, q.data(), kBlockStride, count, cols, initial,
                                StoreBlock<F>{sums});
      } else {
        multiply<Arch, F, true>(left, q.data(), kBlockStride, count, cols, initial, write);
      }
    }
  }
};

template <class G>
struct WriteRawTile {
  using F = ComputeOf<G>;

  const Bucket& bucket;
  const RawSegment& raw;
  const Tile& tile;

  template <class Arch>
  POWERSGD_INLINE void run() const {
    const F* payload = elements<F>(bucket.p_payload, raw.p_offset) + tile.col_begin;
    G* gradient = elements<G>(bucket.gradient, raw.gradient_offset) + tile.col_begin;
    const F scale = static_cast<F>(bucket.output_scale);
    for_each_vector<Arch, F>(tile.col_end - tile.col_begin,
                             [&](int64_t j, int64_t count) POWERSGD_INLINE_LAMBDA {
                               const Vector<Arch, F> sum = load_first<Arch>(payload + j, count);
                               store_first<Arch>(gradient + j, count, Vector<Arch, F>(sum * scale));
                             });
  }
};

// G = NaN, after memory, if there is one, has given back what project added to it.
template <class G, class R>
void skip_elements(G* gradient, R* memory, int64_t count) {
  using F = ComputeOf<G>;
  using V = Vector<Baseline, F>;
  for_each_vector<Baseline, F>(count, [&](int64_t j, int64_t size) {
    if (memory != nullptr) {
      const V finite = finite_or_zero(load_first<Baseline>(gradient + j, size));
      const V kept = load_first<Baseline>(memory + j, size) - finite;
      store_first<Baseline>(memory + j, size, clamped_to<Baseline, R>(kept));
    }
    store_first<Baseline>(gradient + j, size,
                          broadcast<Baseline>(std::numeric_limits<F>::quiet_NaN()));
  });
}

template <class G, class R>
void skip_step(const Bucket& bucket, const ParallelFor& parallel_for) {
  const auto skip_matrix_tile = [&](const Tile& tile) {
    const Matrix& matrix = bucket.matrices[tile.item];
    const int64_t offset = tile.row_begin * matrix.cols;
    R* memory = matrix.memory == nullptr ? nullptr : static_cast<R*>(matrix.memory) + offset;
    skip_elements(elements<G>(bucket.gradient, matrix.gradient_offset) + offset, memory,
                  (tile.row_end - tile.row_begin) * matrix.cols);
  };
  const auto skip_raw_tile = [&](const Tile& tile) {
    const int64_t offset = bucket.raw_segments[tile.item].gradient_offset + tile.col_begin;
    skip_elements<G, R>(elements<G>(bucket.gradient, offset), nullptr,
                        tile.col_end - tile.col_begin);
  };
  for_each_matrix_and_raw_tile(bucket, kMatrixTiles, parallel_for, skip_matrix_tile, skip_raw_tile);
}

// Zeroes the local factors of the matrices that are out of use, or of all matrices: memory alone is
// then the residual.
template <class F>
void clear_sent(const Bucket& bucket, bool all) {
  for (int32_t i = 0; i < bucket.num_matrices; ++i) {
    const Matrix& matrix = bucket.matrices[i];
    if (!all && !out_of_use<F>(bucket, matrix)) continue;
    std::fill_n(static_cast<F*>(matrix.q_local), matrix.rank * matrix.cols, F{0});
  }
}

// A gradient that the caches would not keep is better stored past them: a store through them first
// reads what it overwrites.
bool exceeds_caches(const Bucket& bucket) {
  constexpr int64_t kLarge = int64_t{4} << 20;
  int64_t numel = 0;
  for (int32_t i = 0; i < bucket.num_matrices; ++i) {
    numel += bucket.matrices[i].rows * bucket.matrices[i].cols;
  }
  return numel * size_of(bucket.gradient_dtype) >= kLarge;
}

template <class G>
void reconstruct_tile(Isa isa, const Bucket& bucket, const Tile& tile, bool stream) {
  constexpr auto kLine = uintptr_t{64};
  const Matrix& matrix = bucket.matrices[tile.item];
  const auto address =
      reinterpret_cast<uintptr_t>(elements<G>(bucket.gradient, matrix.gradient_offset));
  const uintptr_t missing = (kLine - address % kLine) % kLine;
  const uintptr_t row_bytes = static_cast<uintptr_t>(matrix.cols) * sizeof(G);
  // All rows are to have the same lead.
  if (stream && missing % sizeof(G) == 0 && row_bytes % kLine == 0) {
    const auto lead = static_cast<int64_t>(missing / sizeof(G));
    run_on(isa, ReconstructTile<G, true>{bucket, matrix, tile, lead});
  } else {
    run_on(isa, ReconstructTile<G, false>{bucket, matrix, tile, 0});
  }
}

template <class G>
void apply_step(Isa isa, const Bucket& bucket, const ParallelFor& parallel_for) {
  const bool stream = exceeds_caches(bucket);
  for_each_matrix_and_raw_tile(
      bucket, kMatrixTiles, parallel_for,
      [&](const Tile& tile) { reconstruct_tile<G>(isa, bucket, tile, stream); },
      [&](const Tile& tile) {
        run_on(isa, WriteRawTile<G>{bucket, bucket.raw_segments[tile.item], tile});
      });
  update_warm_start<ComputeOf<G>>(isa, bucket, parallel_for);
}

template <class G, class R>
void reconstruct_or_skip(Isa isa, const Bucket& bucket, const ParallelFor& parallel_for) {
  Verdict& verdict = *bucket.verdict;
  if (verdict.skipped == 0 && !norms_are_finite<ComputeOf<G>>(isa, bucket, parallel_for)) {
    verdict.skipped = 1;
  }
  clear_sent<ComputeOf<G>>(bucket, verdict.skipped != 0);
  if (verdict.skipped == 0) {
    apply_step<G>(isa, bucket, parallel_for);
  } else {
    skip_step<G, R>(bucket, parallel_for);
    count_step(bucket, &StepCounts::skipped);
  }
}

}  // namespace

void reconstruct(Isa isa, const Bucket& bucket, const ParallelFor& parallel_for) {
  with_storage_pair(bucket.gradient_dtype, bucket.residual_dtype, [&](auto g, auto r) {
    reconstruct_or_skip<decltype(g), decltype(r)>(isa, bucket, parallel_for);
  });
}

void reconstruct(const Bucket& bucket, const ParallelFor& parallel_for) {
  reconstruct(best_isa(), bucket, parallel_for);
}

}  // namespace powersgd::kernels::cpu
