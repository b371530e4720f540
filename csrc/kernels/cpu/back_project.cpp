// SPDX-License-Identifier: BSD-3-Clause
//
// back_project: q_local = p_hat^T M, also written to the Q payload.
//
// A tile owns a range of rows and a strip of columns, narrow enough for its partial q to stay in the
// L1 cache while the rows stream by. A second pass adds the partial q of a strip in the order of the
// rows, so that the sum does not depend on who computed what.
#include "blocks.h"
#include "convert.h"

namespace powersgd::kernels::cpu {
namespace {

// S: what M is stored as. Without memory M is the gradient, with 0 where it is not finite.
template <class S, bool kFiniteOnly>
struct BackProjectTile {
  using F = ComputeOf<S>;

  const Bucket& bucket;
  const Matrix& matrix;
  const Tile& tile;
  const S* m;

  template <class Arch>
  POWERSGD_INLINE void run() const {
    const int64_t cols = tile.col_end - tile.col_begin;
    const int64_t stride = round_up(cols, kPad);
    const F* p_hat = static_cast<const F*>(matrix.p_hat);
    const int64_t part = tile.row_begin / back_project_rows(matrix);
    F* partial = slot_pointer<F>(bucket, tile.slot) + part * matrix.rank * matrix.cols;
    alignas(64) F sums[kPackedElements];
    alignas(64) F left[kRows * kPackedRank];
    alignas(64) F copy[kRows * kMaxBlockCols];
    for (int64_t k = 0; k < matrix.rank; k += kPackedRank) {
      const int64_t count = std::min<int64_t>(kPackedRank, matrix.rank - k);
      std::fill_n(sums, count * stride, F{0});
      for (int64_t row = tile.row_begin; row < tile.row_end; row += kRows) {
        const int64_t rows = std::min<int64_t>(kRows, tile.row_end - row);
        pack_rows(p_hat + row * matrix.rank + k, matrix.rank, rows, count, left);
        const S* source = m + row * matrix.cols + tile.col_begin;
        if constexpr (std::is_same_v<S, F> && !kFiniteOnly) {
          if (rows == kRows && stride == cols) {
            accumulate<Arch, F>(left, source, matrix.cols, count, cols, sums, stride);
            continue;
          }
        }
        copy_rows<Arch>(source, rows, cols, stride, copy);
        accumulate<Arch, F>(left, copy, stride, count, stride, sums, stride);
      }
      for (int64_t n = 0; n < count; ++n) {
        std::copy_n(sums + n * stride, cols, partial + (k + n) * matrix.cols + tile.col_begin);
      }
    }
  }

  template <class Arch>
  POWERSGD_INLINE void copy_rows(const S* source, int64_t rows, int64_t cols, int64_t stride,
                                 F* copy) const {
    constexpr int64_t kLane = kLanes<Arch, F>;
    for (int64_t i = 0; i < rows; ++i) {
      const S* from = source + i * matrix.cols;
      F* to = copy + i * stride;
      int64_t j = 0;
      for (; j + kLane <= cols; j += kLane) store<Arch>(to + j, load_m<Arch>(from + j));
      if (j < cols) {
        const Padded<Arch, S> last(from + j, cols - j);
        store<Arch>(to + j, load_m<Arch>(last.data));
        j += kLane;
      }
      std::fill(to + j, to + stride, F{0});
    }
    std::fill(copy + rows * stride, copy + kRows * stride, F{0});
  }

  template <class Arch>
  POWERSGD_INLINE Vector<Arch, F> load_m(const S* source) const {
    const Vector<Arch, F> value = load_as<Arch>(source);
    const Vector<Arch, F> zero = {};
    if constexpr (kFiniteOnly) return value - value == zero ? value : zero;
    return value;
  }
};

void back_project_tile(Isa isa, const Bucket& bucket, const Tile& tile) {
  const Matrix& matrix = bucket.matrices[tile.item];
  if (matrix.memory != nullptr) {
    with_storage(bucket.residual_dtype, [&](auto residual) {
      using R = decltype(residual);
      run_on(isa, BackProjectTile<R, false>{bucket, matrix, tile,
                                            static_cast<const R*>(matrix.memory)});
    });
  } else {
    with_storage(bucket.gradient_dtype, [&](auto gradient) {
      using G = decltype(gradient);
      run_on(isa, BackProjectTile<G, true>{bucket, matrix, tile,
                                           elements<G>(bucket.gradient, matrix.gradient_offset)});
    });
  }
}

// q of a strip: the sum of its partial q, or 0 if the step is skipped. Plain loops: the strip is a
// small part of what its matrix costs.
template <class F>
void sum_strip(const Bucket& bucket, const Tile& tile) {
  const Matrix& matrix = bucket.matrices[tile.item];
  const bool skipped = bucket.verdict->skipped != 0;
  const int64_t parts = skipped ? 0 : count_parts(matrix.rows, back_project_rows(matrix));
  const F* partial = slot_pointer<F>(bucket, tile.slot);
  F* payload = elements<F>(bucket.q_payload, matrix.q_offset);
  for (int64_t k = 0; k < matrix.rank; ++k) {
    for (int64_t j = k * matrix.cols + tile.col_begin; j < k * matrix.cols + tile.col_end; ++j) {
      F sum = 0;
      for (int64_t part = 0; part < parts; ++part) {
        sum += partial[part * matrix.rank * matrix.cols + j];
      }
      payload[j] = sum;
      if (matrix.q_local != nullptr) static_cast<F*>(matrix.q_local)[j] = sum;
    }
  }
}

}  // namespace

void back_project(Isa isa, const Bucket& bucket, const ParallelFor& parallel_for) {
  if (bucket.verdict->skipped == 0) {
    for_each_tile(bucket, kBackProjectTiles, parallel_for,
                  [&](const Tile& tile) { back_project_tile(isa, bucket, tile); });
  }
  for_each_tile(bucket, kStripTiles, parallel_for, [&](const Tile& tile) {
    if (bucket.factor_dtype == DType::kFloat64) {
      sum_strip<double>(bucket, tile);
    } else {
      sum_strip<float>(bucket, tile);
    }
  });
}

void back_project(const Bucket& bucket, const ParallelFor& parallel_for) {
  back_project(best_isa(), bucket, parallel_for);
}

}  // namespace powersgd::kernels::cpu
