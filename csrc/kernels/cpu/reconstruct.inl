// SPDX-License-Identifier: BSD-3-Clause
//
// reconstruct: G = (output_scale * p_hat) Q ; q_warm = the rows of Q at unit norm, or half random.
//
//   1. The norm of each row of Q is computed in double. A norm that is not finite skips the step.
//   2. G is written block by block as in project, and so are the raw segments, which the reduction
//      has already summed.
//   3. q_warm and q_norms are written.
// A skipped step changes nothing except G, which becomes NaN to tell the caller.
//
// All ranks must get the same bits: each element of G is a sum in the order of k, and the norms are
// summed over a number of lanes that does not depend on the target.
#include <cmath>
#include <limits>

#include "kernels/cpu/blocking/bands.h"
#include "kernels/cpu/blocking/products.h"
#include "kernels/cpu/simd/convert.h"
#include "kernels/cpu/with_storage.h"
#include "kernels/shared/redraw.h"
#include "kernels/shared/steps.h"

namespace powersgd::kernels::cpu::POWERSGD_TARGET {

constexpr int64_t kNormLanes = 16;

// Adds the squares of kNormLanes elements.
inline void add_squares(const float* values, Doubles* sums) {
  constexpr int64_t kLane = kLanes<double>;
  POWERSGD_UNROLL
  for (int64_t i = 0; i < kNormLanes / kLane; ++i) {
    const Doubles value = load_double(values + i * kLane);
    sums[i] += value * value;
  }
}

// Returns the squared norm of a row of Q.
POWERSGD_TILE_FUNCTION inline double squared_norm(const float* row, int64_t cols) {
  constexpr int64_t kLane = kLanes<double>;
  Doubles sums[kNormLanes / kLane] = {};
  int64_t j = 0;
  for (; j + kNormLanes <= cols; j += kNormLanes) add_squares(row + j, sums);
  if (j < cols) {
    float last[kNormLanes] = {};
    std::copy_n(row + j, cols - j, last);
    add_squares(last, sums);
  }
  double lanes[kNormLanes];
  for (int64_t i = 0; i < kNormLanes / kLane; ++i) store(lanes + i * kLane, sums[i]);
  double norm = 0;
  for (const double lane : lanes) norm += lane;
  return norm;
}

POWERSGD_TILE_FUNCTION inline void scale_row_of_q(const float* row, int64_t cols, double scale,
                                                  float* q_warm) {
  constexpr int64_t kLane = kLanes<double>;
  int64_t j = 0;
  for (; j + kLane <= cols; j += kLane) store_double(q_warm + j, load_double(row + j) * scale);
  for (; j < cols; ++j) q_warm[j] = static_cast<float>(row[j] * scale);
}

inline bool norms_are_finite(const Bucket& bucket, const ParallelFor& parallel_for) {
  for_each_tile(bucket, kFactorRowTiles, parallel_for, [&](const Tile& tile) {
    const Matrix& matrix = bucket.matrices[tile.item];
    const float* row =
        elements<float>(bucket.q_payload, matrix.q_offset) + tile.row_begin * matrix.cols;
    *slot_pointer<double>(bucket, tile.slot) = squared_norm(row, matrix.cols);
  });
  const Tile* tile = bucket.tiles + bucket.tile_list_begin[kFactorRowTiles];
  const Tile* end = bucket.tiles + bucket.tile_list_begin[kFactorRowTiles + 1];
  return std::all_of(tile, end, [&](const Tile& row) {
    return std::isfinite(*slot_pointer<double>(bucket, row.slot));
  });
}

// The row of q_warm whose row of Q is zero.
inline void redraw_row(const Bucket& bucket, const Matrix& matrix, int64_t row, float* q_warm) {
  const float scale = unit_row_scale(matrix.cols);
  for (int64_t j = 0; j < matrix.cols; ++j) {
    q_warm[j] = redrawn(bucket, matrix, row, j, scale, q_warm[j]);
  }
}

// Writes q_warm and q_norms.
inline void update_warm_start(const Bucket& bucket, const ParallelFor& parallel_for) {
  for_each_tile(bucket, kFactorRowTiles, parallel_for, [&](const Tile& tile) {
    const Matrix& matrix = bucket.matrices[tile.item];
    const int64_t offset = tile.row_begin * matrix.cols;
    if (out_of_use(bucket, matrix)) return;
    const double norm = std::sqrt(*slot_pointer<double>(bucket, tile.slot));
    if (matrix.q_norms != nullptr) matrix.q_norms[tile.row_begin] = norm;
    float* q_warm = static_cast<float*>(matrix.q_warm) + offset;
    if (norm == 0) return redraw_row(bucket, matrix, tile.row_begin, q_warm);
    const float* row = elements<float>(bucket.q_payload, matrix.q_offset) + offset;
    scale_row_of_q(row, matrix.cols, 1 / norm, q_warm);
  });
}

// The sink of multiply that writes to G.
template <class G, bool kNontemporal>
struct WriteRows {
  G* gradient;
  int64_t row_stride;
  int64_t rows;
  int64_t cols;
  bool aligned;  // to cache lines

  template <int kWidth>
  void put(int64_t i, int64_t j, const Floats (&product)[kWidth]) const {
    constexpr int64_t kLane = kLanes<float>;
    if (i >= rows || j >= cols) return;
    G* target = gradient + i * row_stride + j;
    if (j + kWidth * kLane > cols) {
      G converted[kWidth * kLane];
      store_all_as<false>(converted, product);
      std::copy_n(converted, cols - j, target);
    } else if (kNontemporal && aligned) {
      store_all_as<true>(target, product);
    } else {
      store_all_as<false>(target, product);
    }
  }
};

// Elements of a band. Nothing is prefetched, and the more rows a band has, the less packing costs.
constexpr int64_t kReconstructElements = int64_t{1} << 18;

template <class G, bool kNontemporal>
struct ReconstructTile {
  const Bucket& bucket;
  const Matrix& matrix;
  const Tile& tile;
  int64_t unaligned_cols;  // columns in front of the first that is aligned to a cache line
  float scale = out_of_use(bucket, matrix) ? 0.0f : static_cast<float>(bucket.output_scale);

  POWERSGD_TILE_FUNCTION void run() const {
    PackedFactor<> q(elements<float>(bucket.q_payload, matrix.q_offset), matrix.cols);
    const Region region{
        tile.row_begin, tile.row_end,         0,
        matrix.cols,    kReconstructElements, unaligned_cols > 0 ? unaligned_cols : kBlockCols};
    for_each_block(matrix, region, [&](const BandBlock& block) {
      for (int64_t row = block.row_begin; row < block.row_end; row += kRows) {
        write_rows(block, row, q);
      }
    });
    if (kNontemporal) nontemporal_fence();
  }

  void write_rows(const BandBlock& block, int64_t row, PackedFactor<>& q) const {
    const int64_t rows = std::min<int64_t>(kRows, block.row_end - row);
    const int64_t cols = round_up(block.cols, kPad);
    const float* p_hat = static_cast<const float*>(matrix.p_hat) + row * matrix.rank;
    const int64_t offset = matrix.gradient_offset + row * matrix.cols + block.col;
    const WriteRows<G, kNontemporal> write{elements<G>(bucket.gradient, offset), matrix.cols, rows,
                                           block.cols, block.index > 0 || unaligned_cols == 0};
    alignas(64) float sums[kRows * kBlockStride];
    alignas(64) float left[kRows * kPackedRank];
    for (int64_t k = 0; k == 0 || k < matrix.rank; k += kPackedRank) {
      const int64_t count = std::min(kPackedRank, matrix.rank - k);
      const float* initial = k > 0 ? sums : nullptr;
      q.pack(k, count, block.col, block.cols);
      pack_rows(p_hat + k, matrix.rank, rows, count, scale, left);
      if (k + count < matrix.rank) {
        multiply<Rounding::kReproducible>(left, q.data(), kBlockStride, count, cols, initial,
                                          StoreBlock<float>{sums});
      } else {
        multiply<Rounding::kReproducible>(left, q.data(), kBlockStride, count, cols, initial,
                                          write);
      }
    }
  }
};

template <class G>
POWERSGD_TILE_FUNCTION inline void write_raw_tile(const Bucket& bucket, const Tile& tile) {
  const RawSegment& raw = bucket.raw_segments[tile.item];
  const float* payload = elements<float>(bucket.p_payload, raw.p_offset) + tile.col_begin;
  G* gradient = elements<G>(bucket.gradient, raw.gradient_offset) + tile.col_begin;
  const float scale = static_cast<float>(bucket.output_scale);
  for_each_vector(tile.col_end - tile.col_begin, [&](int64_t j, int64_t count) {
    store_first(gradient + j, count, load_first(payload + j, count) * scale);
  });
}

// Takes back from the residual, if there is one, what project added to it. Then G = NaN.
template <class G, class R>
POWERSGD_TILE_FUNCTION inline void skip_elements(G* gradient, R* residual, int64_t count) {
  for_each_vector(count, [&](int64_t j, int64_t size) {
    if (residual != nullptr) {
      const Floats finite = finite_or_zero(load_first(gradient + j, size));
      const Floats kept = load_first(residual + j, size) - finite;
      store_first(residual + j, size, clamped_to<R>(kept));
    }
    store_first(gradient + j, size, broadcast(std::numeric_limits<float>::quiet_NaN()));
  });
}

template <class G, class R>
inline void skip_step(const Bucket& bucket, const ParallelFor& parallel_for) {
  const auto skip_matrix_tile = [&](const Tile& tile) {
    const Matrix& matrix = bucket.matrices[tile.item];
    const int64_t offset = tile.row_begin * matrix.cols;
    R* residual = matrix.memory == nullptr ? nullptr : static_cast<R*>(matrix.memory) + offset;
    skip_elements(elements<G>(bucket.gradient, matrix.gradient_offset) + offset, residual,
                  (tile.row_end - tile.row_begin) * matrix.cols);
  };
  const auto skip_raw_tile = [&](const Tile& tile) {
    const int64_t offset = bucket.raw_segments[tile.item].gradient_offset + tile.col_begin;
    skip_elements<G, R>(elements<G>(bucket.gradient, offset), nullptr,
                        tile.col_end - tile.col_begin);
  };
  for_each_matrix_and_raw_tile(bucket, parallel_for, skip_matrix_tile, skip_raw_tile);
}

// Zeroes the local factors of the matrices that are out of use, or of all matrices. Nothing of
// these was sent, and the residual stays whole.
inline void clear_sent(const Bucket& bucket, bool all) {
  for (int32_t i = 0; i < bucket.num_matrices; ++i) {
    const Matrix& matrix = bucket.matrices[i];
    if (!all && !out_of_use(bucket, matrix)) continue;
    std::fill_n(static_cast<float*>(matrix.q_local), matrix.rank * matrix.cols, 0.0f);
    if (matrix.q_norms != nullptr) std::fill_n(matrix.q_norms, matrix.rank, 0.0);
  }
}

// Returns whether the gradient is too large for the caches. A store past them is then faster,
// because a store through them first reads what it overwrites.
inline bool exceeds_caches(const Bucket& bucket) {
  constexpr int64_t kLarge = int64_t{4} << 20;
  int64_t numel = 0;
  for (int32_t i = 0; i < bucket.num_matrices; ++i) {
    numel += bucket.matrices[i].rows * bucket.matrices[i].cols;
  }
  return numel * size_of(bucket.gradient_dtype) >= kLarge;
}

template <class G>
inline void reconstruct_tile(const Bucket& bucket, const Tile& tile, bool nontemporal) {
  constexpr auto kLine = uintptr_t{64};
  const Matrix& matrix = bucket.matrices[tile.item];
  const auto address =
      reinterpret_cast<uintptr_t>(elements<G>(bucket.gradient, matrix.gradient_offset));
  const uintptr_t missing = (kLine - address % kLine) % kLine;
  const uintptr_t row_bytes = static_cast<uintptr_t>(matrix.cols) * sizeof(G);
  // All rows must have the same number of unaligned columns.
  if (nontemporal && missing % sizeof(G) == 0 && row_bytes % kLine == 0) {
    const auto unaligned_cols = static_cast<int64_t>(missing / sizeof(G));
    ReconstructTile<G, true>{bucket, matrix, tile, unaligned_cols}.run();
  } else {
    ReconstructTile<G, false>{bucket, matrix, tile, 0}.run();
  }
}

template <class G>
inline void apply_step(const Bucket& bucket, const ParallelFor& parallel_for) {
  const bool nontemporal = exceeds_caches(bucket);
  for_each_matrix_and_raw_tile(
      bucket, parallel_for,
      [&](const Tile& tile) { reconstruct_tile<G>(bucket, tile, nontemporal); },
      [&](const Tile& tile) { write_raw_tile<G>(bucket, tile); });
  update_warm_start(bucket, parallel_for);
}

template <class G, class R>
inline void reconstruct_or_skip(const Bucket& bucket, const ParallelFor& parallel_for) {
  int32_t& skipped = bucket.state->skipped;
  if (skipped == 0 && !norms_are_finite(bucket, parallel_for)) {
    skipped = 1;
  }
  clear_sent(bucket, skipped != 0);
  if (skipped == 0) {
    apply_step<G>(bucket, parallel_for);
  } else {
    skip_step<G, R>(bucket, parallel_for);
    count_skipped_step(bucket);
  }
}

inline void reconstruct(const Bucket& bucket, const ParallelFor& parallel_for) {
  with_storage_pair(bucket.gradient_dtype, bucket.residual_dtype, [&](auto g, auto r) {
    reconstruct_or_skip<decltype(g), decltype(r)>(bucket, parallel_for);
  });
}

}  // namespace powersgd::kernels::cpu::POWERSGD_TARGET
