// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>

#include "kernels/cpu/blocking/bands.h"
#include "kernels/cpu/blocking/element_flags.h"
#include "kernels/cpu/blocking/products.h"
#include "kernels/cpu/simd/convert.h"

// M = G + residual_scale * (memory - what the last step sent), of which memory keeps M: the first
// half of project.
namespace powersgd::kernels::cpu {

// Gradient and memory of a matrix. `offset` and `count`: of the elements of a vector (load_first).
template <class Arch, class G, class R, bool kFeedback>
struct Source {
  using F = ComputeOf<G>;
  using V = Vector<Arch, F>;

  const G* gradient;
  R* memory;
  F residual_scale;

  POWERSGD_INLINE Source(const Bucket& bucket, const Matrix& matrix)
      : gradient(elements<G>(bucket.gradient, matrix.gradient_offset)),
        memory(static_cast<R*>(matrix.memory)),
        residual_scale(static_cast<F>(bucket.residual_scale)) {}

  // G + residual_scale * memory. An element of G that is not finite counts as 0.
  POWERSGD_INLINE V load_sum(int64_t offset, int64_t count, ElementFlags<Arch, F>& seen) const {
    const V g = load_first<Arch>(gradient + offset, count);
    seen.examine(g);
    const V finite = finite_or_zero(g);
    if constexpr (!kFeedback) return finite;
    return residual_scale * load_first<Arch>(memory + offset, count) + finite;
  }

  // Makes m what memory holds. Returns it as it was stored. The clamp keeps memory finite where m
  // is out of its range: an infinity would never leave it.
  POWERSGD_INLINE V keep(int64_t offset, int64_t count, const V& m,
                         ElementFlags<Arch, F>& seen) const {
    if constexpr (!kFeedback) return m;
    seen.template examine_m<R>(m);
    return store_first<Arch>(memory + offset, count, clamped_to<Arch, R>(m));
  }

  POWERSGD_INLINE void prefetch_inputs(int64_t offset) const {
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

  // m is [kRows, kBlockStride], the columns of the block padded with zeros to a multiple of kPad.
  template <class Arch>
  POWERSGD_INLINE void form(const BandBlock& block, int64_t row, F* m,
                            ElementFlags<Arch, F>& seen) const {
    if constexpr (kFeedback) multiply_last_step<Arch>(block, row, m);
    combine<Arch>(block, row, m, seen);
  }

  template <class Arch>
  POWERSGD_INLINE void multiply_last_step(const BandBlock& block, int64_t row, F* product) const {
    const int64_t rank = matrix.rank;
    const int64_t rows = std::min<int64_t>(kRows, block.row_end - row);
    alignas(64) F packed[kRows * kPackedRank];
    for (int64_t k = 0; k == 0 || k < rank; k += kPackedRank) {
      const int64_t count = std::min(kPackedRank, rank - k);
      right.template pack<Arch>(k, count, block.col, block.cols);
      pack_rows(left + row * rank + k, rank, rows, count, static_cast<F>(bucket.residual_scale),
                packed);
      multiply<Arch, F, false>(packed, right.data(), kBlockStride, count,
                               round_up(block.cols, kPad), k > 0 ? product : nullptr,
                               StoreBlock<F>{product});
    }
  }

  // m, the product if there is one, becomes M.
  template <class Arch>
  POWERSGD_INLINE void combine(const BandBlock& block, int64_t row, F* m,
                               ElementFlags<Arch, F>& seen) const {
    const int64_t rows = std::min<int64_t>(kRows, block.row_end - row);
    const Source<Arch, G, R, kFeedback> source(bucket, matrix);
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t offset = (row + i) * matrix.cols + block.col;
      const int64_t ahead = block.ahead(row + i, matrix.cols);
      F* target = m + i * kBlockStride;
      for_each_vector<Arch, F>(block.cols, [&](int64_t j, int64_t count) POWERSGD_INLINE_LAMBDA {
        source.prefetch_inputs(ahead + j);
        Vector<Arch, F> sum = source.load_sum(offset + j, count, seen);
        if constexpr (kFeedback) sum -= load<Arch>(target + j);
        store<Arch>(target + j, source.keep(offset + j, count, sum, seen));
      });
      const int64_t padded = round_up(block.cols, kLanes<Arch, F>);
      std::fill(target + padded, target + round_up(block.cols, kPad), F{0});
    }
    std::fill(m + rows * kBlockStride, m + kRows * kBlockStride, F{0});
  }
};

}  // namespace powersgd::kernels::cpu
