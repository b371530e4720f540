// SPDX-License-Identifier: BSD-3-Clause
//
// back_project: q_local = p_hat^T M, also written to the Q payload.
//
// A tile owns a range of rows and a strip of columns and adds up their partial q. A second pass adds
// the partial q of a strip in the order of the rows, so that the sum does not depend on who computed
// what.
#include "bands.h"
#include "blocks.h"
#include "convert.h"

namespace powersgd::kernels::cpu {
namespace {

// kRows rows of M, as accumulate reads them. Where there are fewer, the last one stands in for the
// rest, multiplied by 0. Without memory M is the gradient, with 0 where it is not finite.
template <class Arch, class S, bool kFiniteOnly>
struct LoadRows {
  using F = ComputeOf<S>;

  const S* m;
  int64_t row_stride;
  int64_t rows;
  int64_t cols;
  const S* matrix;
  int64_t ahead[kRows];  // what to ask for (bands.h)

  template <class>
  POWERSGD_INLINE Vector<Arch, F> get(int64_t i, int64_t j) const {
    const S* source = m + std::min(i, rows - 1) * row_stride + j;
    if (j + kLanes<Arch, F> <= cols) {
      prefetch(matrix, ahead[i] + j);
      return finite(load_as<Arch>(source));
    }
    const Padded<Arch, S> last(source, cols - j);
    return finite(load_as<Arch>(last.data));
  }

  static POWERSGD_INLINE Vector<Arch, F> finite(const Vector<Arch, F>& value) {
    const Vector<Arch, F> zero = {};
    if constexpr (kFiniteOnly) return value - value == zero ? value : zero;
    return value;
  }
};

template <class S, bool kFiniteOnly>
struct BackProjectTile {
  using F = ComputeOf<S>;

  const Bucket& bucket;
  const Matrix& matrix;
  const Tile& tile;
  const S* m;

  template <class Arch>
  POWERSGD_INLINE void run() const {
    const int64_t stride = partial_q_stride(matrix);
    const int64_t part = tile.row_begin / back_project_rows(matrix);
    F* partial = slot_pointer<F>(bucket, tile.slot) + part * matrix.rank * stride;
    const int64_t padded_end = round_up(tile.col_end, kPad);
    for (int64_t k = 0; k < matrix.rank; ++k) {
      std::fill(partial + k * stride + tile.col_begin, partial + k * stride + padded_end, F{0});
    }
    for_each_block(matrix, tile.row_begin, tile.row_end, tile.col_begin, tile.col_end,
                   [&](const BandBlock& block) POWERSGD_INLINE_LAMBDA {
                     for (int64_t row = block.row_begin; row < block.row_end; row += kRows) {
                       add_rows<Arch>(block, row, partial + block.col, stride);
                     }
                   });
  }

  template <class Arch>
  POWERSGD_INLINE void add_rows(const BandBlock& block, int64_t row, F* sums,
                                int64_t stride) const {
    const int64_t rows = std::min<int64_t>(kRows, block.row_end - row);
    LoadRows<Arch, S, kFiniteOnly> source{
        m + row * matrix.cols + block.col, matrix.cols, rows, block.cols, m, {}};
    for (int64_t i = 0; i < kRows; ++i) source.ahead[i] = block.ahead(row + i, matrix.cols);
    const F* p_hat = static_cast<const F*>(matrix.p_hat) + row * matrix.rank;
    alignas(64) F left[kRows * kPackedRank];
    for (int64_t k = 0; k < matrix.rank; k += kPackedRank) {
      const int64_t count = std::min(kPackedRank, matrix.rank - k);
      pack_rows(p_hat + k, matrix.rank, rows, count, left);
      accumulate<Arch, F>(left, source, count, block.cols, sums + k * stride, stride);
    }
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

// q of a strip: the sum of its partial q, or 0 if the step is skipped.
template <class F>
struct SumStrip {
  const Bucket& bucket;
  const Matrix& matrix;
  const Tile& tile;

  template <class Arch>
  POWERSGD_INLINE void run() const {
    const bool skipped = bucket.verdict->skipped != 0;
    const int64_t parts = skipped ? 0 : count_parts(matrix.rows, back_project_rows(matrix));
    const int64_t stride = partial_q_stride(matrix);
    const F* partial = slot_pointer<F>(bucket, tile.slot);
    F* payload = elements<F>(bucket.q_payload, matrix.q_offset);
    for (int64_t k = 0; k < matrix.rank; ++k) {
      for (int64_t j = tile.col_begin; j < tile.col_end; j += kPad) {
        const int64_t count = std::min(kPad, tile.col_end - j);
        F sums[kPad];
        add_parts<Arch>(partial + k * stride + j, parts, matrix.rank * stride, sums);
        const int64_t target = k * matrix.cols + j;
        std::copy_n(sums, count, payload + target);
        if (matrix.q_local != nullptr) {
          std::copy_n(sums, count, static_cast<F*>(matrix.q_local) + target);
        }
      }
    }
  }

  // kPad elements.
  template <class Arch>
  POWERSGD_INLINE void add_parts(const F* partial, int64_t parts, int64_t part_stride,
                                 F* sums) const {
    constexpr int64_t kLane = kLanes<Arch, F>;
    Vector<Arch, F> sum[kPad / kLane] = {};
    for (int64_t part = 0; part < parts; ++part) {
      POWERSGD_UNROLL
      for (int64_t i = 0; i < kPad / kLane; ++i) {
        sum[i] += load<Arch, F>(partial + part * part_stride + i * kLane);
      }
    }
    POWERSGD_UNROLL
    for (int64_t i = 0; i < kPad / kLane; ++i) store<Arch, F>(sums + i * kLane, sum[i]);
  }
};

}  // namespace

void back_project(Isa isa, const Bucket& bucket, const ParallelFor& parallel_for) {
  if (bucket.verdict->skipped == 0) {
    for_each_tile(bucket, kBackProjectTiles, parallel_for,
                  [&](const Tile& tile) { back_project_tile(isa, bucket, tile); });
  }
  for_each_tile(bucket, kStripTiles, parallel_for, [&](const Tile& tile) {
    const Matrix& matrix = bucket.matrices[tile.item];
    if (bucket.factor_dtype == DType::kFloat64) {
      run_on(isa, SumStrip<double>{bucket, matrix, tile});
    } else {
      run_on(isa, SumStrip<float>{bucket, matrix, tile});
    }
  });
}

void back_project(const Bucket& bucket, const ParallelFor& parallel_for) {
  back_project(best_isa(), bucket, parallel_for);
}

}  // namespace powersgd::kernels::cpu
