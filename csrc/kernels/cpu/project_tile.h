// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "bands.h"
#include "blocks.h"
#include "convert.h"

// The two kernels of project.cpp: by single rows for low ranks, in kRows rows for any rank.
namespace powersgd::kernels::cpu {

// Adds NaN to `poison` where an element is not finite, and takes that element as 0.
template <class Arch, class G>
POWERSGD_INLINE Vector<Arch, ComputeOf<G>> load_finite(const G* gradient,
                                                       Vector<Arch, ComputeOf<G>>& poison) {
  const Vector<Arch, ComputeOf<G>> zero = {};
  const Vector<Arch, ComputeOf<G>> g = load_as<Arch, G>(gradient);
  const Vector<Arch, ComputeOf<G>> zero_or_nan = g - g;
  poison += zero_or_nan;
  return zero_or_nan == zero ? g : zero;
}

// Rows of gradient and memory in one block of columns.
template <class Arch, class G, class R, bool kFeedback>
struct Rows {
  using F = ComputeOf<G>;
  using V = Vector<Arch, F>;

  const G* gradient;
  R* memory;
  F residual_scale;
  int64_t cols;

  // The vector of M at `offset`, column j of the block, given that of p_hat q_local: stored, and as it
  // was stored. The clamp keeps memory finite where the sum is out of its range: an infinity would
  // never leave it.
  POWERSGD_INLINE V combine(int64_t offset, int64_t j, const V& product, V& poison) const {
    const G* g = gradient + offset;
    if (j + kLanes<Arch, F> <= cols) {
      if constexpr (!kFeedback) return load_finite<Arch>(g, poison);
      return update(g, memory + offset, product, poison);
    }
    const int64_t count = std::max<int64_t>(cols - j, 0);
    const Padded<Arch, G> last_gradient(g, count);
    if constexpr (!kFeedback) return load_finite<Arch>(last_gradient.data, poison);
    Padded<Arch, R> last_memory(memory + offset, count);
    const V m = update(last_gradient.data, last_memory.data, product, poison);
    std::copy_n(last_memory.data, count, memory + offset);
    return m;
  }

  POWERSGD_INLINE V update(const G* g, R* m, const V& product, V& poison) const {
    const V error = residual_scale * (load_as<Arch, R>(m) - product);
    return store_rounded<Arch>(m, clamped_to<R>(error + load_finite<Arch>(g, poison)));
  }

  POWERSGD_INLINE void ask_for(const G* first_gradient, const R* first_memory, int64_t ahead) const {
    prefetch(first_gradient, ahead);
    if constexpr (kFeedback) prefetch(first_memory, ahead);
  }
};

// What both kernels are given.
template <class G, class R, bool kFeedback>
struct ProjectArguments {
  using F = ComputeOf<G>;

  const Bucket& bucket;
  const Matrix& matrix;
  const Tile& tile;

  const G* gradient() const { return elements<G>(bucket.gradient, matrix.gradient_offset); }
  R* memory() const { return static_cast<R*>(matrix.memory); }
  const F* p_hat() const { return static_cast<const F*>(matrix.p_hat); }
  F* p() const { return elements<F>(bucket.p_payload, matrix.p_offset); }

  template <class Arch>
  POWERSGD_INLINE Rows<Arch, G, R, kFeedback> rows(int64_t cols) const {
    return {gradient(), memory(), static_cast<F>(bucket.residual_scale), cols};
  }

  template <class Arch>
  POWERSGD_INLINE void finish(const Vector<Arch, F>& poison) const {
    *slot_pointer<int32_t>(bucket, tile.slot) = !(sum_of_lanes<Arch, F>(poison) == 0);
  }

  // The payload holds arbitrary numbers before the first block of a row.
  POWERSGD_INLINE void add_to_p(int64_t row, int64_t k, int64_t col, F value) const {
    F& target = p()[row * matrix.rank + k];
    target = col == 0 ? value : target + value;
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
    Vector<Arch, F> poison = {};
    for_each_block(matrix, arguments.tile.row_begin, arguments.tile.row_end, 0, matrix.cols,
                   [&](const BandBlock& block) POWERSGD_INLINE_LAMBDA {
                     local.pack(0, matrix.rank, block.col, block.cols);
                     warm.pack(0, matrix.rank, block.col, block.cols);
                     for (int64_t row = block.row_begin; row < block.row_end; ++row) {
                       project_row<Arch>(block, row, local.data(), warm.data(), local.stride(),
                                         poison);
                     }
                   });
    arguments.template finish<Arch>(poison);
  }

  template <class Arch>
  POWERSGD_INLINE void project_row(const BandBlock& block, int64_t row, const F* local,
                                   const F* warm, int64_t stride,
                                   Vector<Arch, F>& poison) const {
    const Matrix& matrix = arguments.matrix;
    const auto rows = arguments.template rows<Arch>(block.cols);
    const int64_t offset = row * matrix.cols + block.col;
    const int64_t ahead = block.ahead(row, matrix.cols);
    Vector<Arch, F> p_hat[kRank];
    Vector<Arch, F> sum[kRank] = {};
    POWERSGD_UNROLL
    for (int k = 0; k < kRank; ++k) {
      const F value = k < matrix.rank ? arguments.p_hat()[row * matrix.rank + k] : F{0};
      p_hat[k] = Vector<Arch, F>{} + value;
    }
    for (int64_t j = 0; j < stride; j += kLanes<Arch, F>) {
      rows.ask_for(rows.gradient, rows.memory, ahead + j);
      Vector<Arch, F> product = p_hat[0] * load<Arch>(local + j);
      POWERSGD_UNROLL
      for (int k = 1; k < kRank; ++k) product += p_hat[k] * load<Arch>(local + k * stride + j);
      const Vector<Arch, F> m = rows.combine(offset + j, j, product, poison);
      POWERSGD_UNROLL
      for (int k = 0; k < kRank; ++k) sum[k] += m * load<Arch>(warm + k * stride + j);
    }
    F sums[kRank];
    sums_of_lanes<Arch, F, kRank>(sum, sums);
    for (int64_t k = 0; k < matrix.rank; ++k) arguments.add_to_p(row, k, block.col, sums[k]);
  }
};

// Turns what multiply hands over, p_hat q_local, into M, in memory and in `block`.
template <class Arch, class G, class R, bool kFeedback>
struct CombineRows {
  using F = ComputeOf<G>;

  Rows<Arch, G, R, kFeedback> source;
  int64_t offset;
  int64_t row_stride;
  int64_t rows;
  int64_t ahead[kRows];
  F* block;
  int64_t block_stride;
  Vector<Arch, F>* poison;

  template <class>
  POWERSGD_INLINE void put(int64_t i, int64_t j, const Vector<Arch, F>& product) const {
    F* target = block + i * block_stride + j;
    if (i >= rows) return store<Arch>(target, Vector<Arch, F>{});
    source.ask_for(source.gradient, source.memory, ahead[i] + j);
    store<Arch>(target, source.combine(offset + i * row_stride + j, j, product, *poison));
  }
};

template <class G, class R, bool kFeedback>
struct ProjectAnyRank {
  using F = ComputeOf<G>;

  ProjectArguments<G, R, kFeedback> arguments;

  template <class Arch>
  POWERSGD_INLINE void run() const {
    const Matrix& matrix = arguments.matrix;
    PackedFactor<F> local(matrix.q_local, matrix.cols);
    PackedFactor<F> warm(matrix.q_warm, matrix.cols);
    Vector<Arch, F> poison = {};
    for_each_block(matrix, arguments.tile.row_begin, arguments.tile.row_end, 0, matrix.cols,
                   [&](const BandBlock& block) POWERSGD_INLINE_LAMBDA {
                     for (int64_t row = block.row_begin; row < block.row_end; row += kRows) {
                       alignas(64) F m[kRows * kBlockCols];
                       combine_rows<Arch>(block, row, local, m, poison);
                       multiply_warm<Arch>(block, row, m, warm);
                     }
                   });
    arguments.template finish<Arch>(poison);
  }

  // m = M, and so does memory
  template <class Arch>
  POWERSGD_INLINE void combine_rows(const BandBlock& block, int64_t row, PackedFactor<F>& local,
                                    F* m, Vector<Arch, F>& poison) const {
    const Matrix& matrix = arguments.matrix;
    const int64_t rows = std::min<int64_t>(kRows, block.row_end - row);
    const int64_t stride = round_up(block.cols, kPad);
    CombineRows<Arch, G, R, kFeedback> combine{arguments.template rows<Arch>(block.cols),
                                               row * matrix.cols + block.col,
                                               matrix.cols,
                                               rows,
                                               {},
                                               m,
                                               stride,
                                               &poison};
    for (int64_t i = 0; i < kRows; ++i) combine.ahead[i] = block.ahead(row + i, matrix.cols);
    // Without feedback there is nothing to subtract.
    const int64_t rank = kFeedback ? matrix.rank : 0;
    alignas(64) F left[kRows * kPackedRank];
    for (int64_t k = 0; k == 0 || k < rank; k += kPackedRank) {
      const int64_t count = std::min(kPackedRank, rank - k);
      const F* initial = k > 0 ? m : nullptr;
      local.pack(k, count, block.col, block.cols);
      pack_rows(arguments.p_hat() + row * rank + k, rank, rows, count, left);
      if (k + count < rank) {
        multiply<Arch, F>(left, local.data(), stride, count, stride, initial,
                          StoreBlock<F>{m, stride});
      } else {
        multiply<Arch, F>(left, local.data(), stride, count, stride, initial, combine);
      }
    }
  }

  // P += m q_warm^T
  template <class Arch>
  POWERSGD_INLINE void multiply_warm(const BandBlock& block, int64_t row, const F* m,
                                     PackedFactor<F>& warm) const {
    const int64_t rank = arguments.matrix.rank;
    const int64_t rows = std::min<int64_t>(kRows, block.row_end - row);
    alignas(64) F sums[kRows * kPackedRank];
    for (int64_t k = 0; k < rank; k += kPackedRank) {
      const int64_t count = std::min(kPackedRank, rank - k);
      warm.pack(k, count, block.col, block.cols);
      dot<Arch, F>(m, warm.data(), warm.stride(), count, sums);
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t n = 0; n < count; ++n) {
          arguments.add_to_p(row + i, k + n, block.col, sums[n * kRows + i]);
        }
      }
    }
  }
};

}  // namespace powersgd::kernels::cpu
