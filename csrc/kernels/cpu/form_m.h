// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>

#include "kernels/cpu/blocking/bands.h"
#include "kernels/cpu/blocking/finite_check.h"
#include "kernels/cpu/blocking/products.h"
#include "kernels/cpu/simd/convert.h"

// M = G + residual_scale * (residual - the product that the last step sent): the first half of
// project. M becomes the residual.
namespace powersgd::kernels::cpu::POWERSGD_TARGET {

// The gradient and the residual of a matrix. `offset` and `count` name the elements of a vector
// (load_first).
template <class G, class R, bool kFeedback>
struct MatrixElements {
  const G* gradient;
  R* residual;
  float residual_scale;

  MatrixElements(const Bucket& bucket, const Matrix& matrix, float scale)
      : gradient(elements<G>(bucket.gradient, matrix.gradient_offset)),
        residual(static_cast<R*>(matrix.memory)),
        residual_scale(scale) {}

  // Returns G + residual_scale * residual. An element of G that is not finite counts as 0.
  Floats load_sum(int64_t offset, int64_t count, FiniteCheck& check) const {
    const Floats g = load_first(gradient + offset, count);
    check.add(g);
    const Floats finite = finite_or_zero(g);
    if constexpr (!kFeedback) return finite;
    return multiply_add(broadcast(residual_scale), load_first(residual + offset, count), finite);
  }

  // Stores m as the residual, and returns it as stored. The clamp keeps the residual finite where m
  // is out of its range: an infinity would never leave it.
  Floats store_m(int64_t offset, int64_t count, Floats m) const {
    if constexpr (kFeedback) return store_first(residual + offset, count, clamped_to<R>(m));
    return m;
  }

  void prefetch_inputs(int64_t offset) const {
    prefetch(gradient, offset);
    if constexpr (kFeedback) prefetch(residual, offset);
  }
};

// Forms M of kRows rows of a block in a buffer in the L1 cache, so the factors are loaded a quarter
// as often. The last step sent the product `left` `right`, of any rank.
template <class G, class R, bool kFeedback>
struct FormRows {
  const Bucket& bucket;
  const Matrix& matrix;
  const float* left;      // [rows, rank]
  PackedFactor<>& right;  // [rank, cols]
  float residual_scale;

  // m is [kRows, kBlockStride], the columns of the block padded with zeros to a multiple of kPad.
  void form(const BandBlock& block, int64_t row, float* m, FiniteCheck& check) const {
    if constexpr (kFeedback) multiply_last_step(block, row, m);
    combine(block, row, m, check);
  }

  void multiply_last_step(const BandBlock& block, int64_t row, float* product) const {
    const int64_t rank = matrix.rank;
    const int64_t rows = std::min<int64_t>(kRows, block.row_end - row);
    alignas(64) float packed[kRows * kPackedRank];
    for (int64_t k = 0; k == 0 || k < rank; k += kPackedRank) {
      const int64_t count = std::min(kPackedRank, rank - k);
      right.pack(k, count, block.col, block.cols);
      pack_rows(left + row * rank + k, rank, rows, count, residual_scale, packed);
      multiply<Rounding::kFastest>(packed, right.data(), kBlockStride, count,
                                   round_up(block.cols, kPad), k > 0 ? product : nullptr,
                                   StoreBlock<float>{product});
    }
  }

  // m, the product if there is one, becomes M.
  void combine(const BandBlock& block, int64_t row, float* m, FiniteCheck& check) const {
    const int64_t rows = std::min<int64_t>(kRows, block.row_end - row);
    const MatrixElements<G, R, kFeedback> source(bucket, matrix, residual_scale);
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t offset = (row + i) * matrix.cols + block.col;
      const int64_t ahead = block.ahead(row + i, matrix.cols);
      float* target = m + i * kBlockStride;
      for_each_vector<2>(block.cols, [&](int64_t j, int64_t count) {
        source.prefetch_inputs(ahead + j);
        Floats sum = source.load_sum(offset + j, count, check);
        if constexpr (kFeedback) sum -= load(target + j);
        store(target + j, source.store_m(offset + j, count, sum));
      });
      const int64_t padded = round_up(block.cols, kLanes<float>);
      std::fill(target + padded, target + round_up(block.cols, kPad), 0.0f);
    }
    std::fill(m + rows * kBlockStride, m + kRows * kBlockStride, 0.0f);
  }
};

}  // namespace powersgd::kernels::cpu::POWERSGD_TARGET
