// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>

#include "bands.h"
#include "blocks.h"
#include "convert.h"
#include "met.h"

// M = G + residual_scale * (memory - what the last step sent), of which memory keeps M: the first
// half of project and of project_transposed.
namespace powersgd::kernels::cpu {

// An element that is not finite counts as 0.
template <class Arch, class G>
POWERSGD_INLINE Vector<Arch, ComputeOf<G>> load_finite(const G* gradient,
                                                       Met<Arch, ComputeOf<G>>& met) {
  const Vector<Arch, ComputeOf<G>> zero = {};
  const Vector<Arch, ComputeOf<G>> g = load_as<Arch, G>(gradient);
  return met.look_at(g) == zero ? g : zero;
}

// Gradient and memory of a matrix, in one block of columns.
template <class Arch, class G, class R, bool kFeedback>
struct Source {
  using F = ComputeOf<G>;
  using V = Vector<Arch, F>;

  const G* gradient;
  R* memory;
  F residual_scale;
  int64_t cols;

  POWERSGD_INLINE Source(const Bucket& bucket, const Matrix& matrix, int64_t block_cols)
      : gradient(elements<G>(bucket.gradient, matrix.gradient_offset)),
        memory(static_cast<R*>(matrix.memory)),
        residual_scale(static_cast<F>(bucket.residual_scale)),
        cols(block_cols) {}

  // The vector of M at `offset`, column j of the block, given that of p_hat q_local: stored, and as
  // it was stored. The clamp keeps memory finite where the sum is out of its range: an infinity
  // would never leave it.
  POWERSGD_INLINE V combine(int64_t offset, int64_t j, const V& product, Met<Arch, F>& met) const {
    const G* g = gradient + offset;
    if (j + kLanes<Arch, F> <= cols) {
      if constexpr (!kFeedback) return load_finite<Arch>(g, met);
      return update(g, memory + offset, product, met);
    }
    const int64_t count = std::max<int64_t>(cols - j, 0);
    const Padded<Arch, G> last_gradient(g, count);
    if constexpr (!kFeedback) return load_finite<Arch>(last_gradient.data, met);
    Padded<Arch, R> last_memory(memory + offset, count);
    const V m = update(last_gradient.data, last_memory.data, product, met);
    std::copy_n(last_memory.data, count, memory + offset);
    return m;
  }

  POWERSGD_INLINE V update(const G* g, R* m, const V& product, Met<Arch, F>& met) const {
    const V error = residual_scale * (load_as<Arch, R>(m) - product);
    const V sum = error + load_finite<Arch>(g, met);
    met.template look_at_m<R>(sum);
    return store_rounded<Arch>(m, clamped_to<R>(sum));
  }

  POWERSGD_INLINE void ask_for(int64_t offset) const {
    prefetch(gradient, offset);
    if constexpr (kFeedback) prefetch(memory, offset);
  }
};

// M of kRows rows of a block, by way of a buffer in the L1 cache, for which the factors are loaded
// a quarter as often. What the last step sent is left right, of any rank.
template <class G, class R, bool kFeedback>
struct FormRows {
  using F = ComputeOf<G>;

  const Bucket& bucket;
  const Matrix& matrix;
  const F* left;           // [rows, rank]
  PackedFactor<F>& right;  // [rank, cols]

  // m is [kRows, the columns of the block, padded with zeros to a multiple of kPad].
  template <class Arch>
  POWERSGD_INLINE void form(const BandBlock& block, int64_t row, F* m, Met<Arch, F>& met) const {
    if (kFeedback) multiply_last_step<Arch>(block, row, m);
    combine<Arch>(block, row, m, met);
  }

  template <class Arch>
  POWERSGD_INLINE void multiply_last_step(const BandBlock& block, int64_t row, F* product) const {
    const int64_t rank = matrix.rank;
    const int64_t stride = round_up(block.cols, kPad);
    const int64_t rows = std::min<int64_t>(kRows, block.row_end - row);
    alignas(64) F packed[kRows * kPackedRank];
    for (int64_t k = 0; k == 0 || k < rank; k += kPackedRank) {
      const int64_t count = std::min(kPackedRank, rank - k);
      right.pack(k, count, block.col, block.cols);
      pack_rows(left + row * rank + k, rank, rows, count, packed);
      multiply<Arch, F>(packed, right.data(), stride, count, stride, k > 0 ? product : nullptr,
                        StoreBlock<F>{product, stride});
    }
  }

  // m, the product, becomes M.
  template <class Arch>
  POWERSGD_INLINE void combine(const BandBlock& block, int64_t row, F* m, Met<Arch, F>& met) const {
    const int64_t stride = round_up(block.cols, kPad);
    const int64_t rows = std::min<int64_t>(kRows, block.row_end - row);
    const Source<Arch, G, R, kFeedback> source(bucket, matrix, block.cols);
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t offset = (row + i) * matrix.cols + block.col;
      const int64_t ahead = block.ahead(row + i, matrix.cols);
      F* target = m + i * stride;
      for (int64_t j = 0; j < stride; j += kLanes<Arch, F>) {
        source.ask_for(ahead + j);
        const Vector<Arch, F> product = load<Arch>(target + j);
        store<Arch>(target + j, source.combine(offset + j, j, product, met));
      }
    }
    std::fill(m + rows * stride, m + kRows * stride, F{0});
  }
};

}  // namespace powersgd::kernels::cpu
