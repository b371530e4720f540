// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "bands.h"
#include "blocks.h"
#include "convert.h"

// The two kernels of project.cpp: one row at a time for low ranks, kRows rows for any rank.
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

// Gradient and memory of a matrix, in one block of columns.
template <class Arch, class G, class R, bool kFeedback>
struct Source {
  using F = ComputeOf<G>;
  using V = Vector<Arch, F>;

  const G* gradient;
  R* memory;
  F residual_scale;
  int64_t cols;

  // The vector of M at `offset`, column j of the block, given that of p_hat q_local: stored, and as
  // it was stored. The clamp keeps memory finite where the sum is out of its range: an infinity
  // would never leave it.
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

  POWERSGD_INLINE void ask_for(int64_t offset) const {
    prefetch(gradient, offset);
    if constexpr (kFeedback) prefetch(memory, offset);
  }
};

// What both kernels are given.
template <class G, class R, bool kFeedback>
struct ProjectArguments {
  using F = ComputeOf<G>;

  const Bucket& bucket;
  const Matrix& matrix;
  const Tile& tile;

  Walk walk() const { return {tile.row_begin, tile.row_end, 0, matrix.cols}; }
  const G* gradient() const { return elements<G>(bucket.gradient, matrix.gradient_offset); }
  R* memory() const { return static_cast<R*>(matrix.memory); }
  const F* p_hat() const { return static_cast<const F*>(matrix.p_hat); }
  F* p() const { return elements<F>(bucket.p_payload, matrix.p_offset); }

  template <class Arch>
  POWERSGD_INLINE Source<Arch, G, R, kFeedback> source(int64_t cols) const {
    return {gradient(), memory(), static_cast<F>(bucket.residual_scale), cols};
  }

  template <class Arch>
  POWERSGD_INLINE void finish(const Vector<Arch, F>& poison) const {
    *slot_pointer<int32_t>(bucket, tile.slot) = !(sum_of_lanes<Arch, F>(poison) == 0);
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
    Vector<Arch, F> poison = {};
    arguments.clear_p();
    for_each_block(matrix, arguments.walk(), [&](const BandBlock& block) POWERSGD_INLINE_LAMBDA {
      local.pack(0, matrix.rank, block.col, block.cols);
      warm.pack(0, matrix.rank, block.col, block.cols);
      for (int64_t row = block.row_begin; row < block.row_end; ++row) {
        project_row<Arch>(block, row, local.data(), warm.data(), local.stride(), poison);
      }
    });
    arguments.template finish<Arch>(poison);
  }

  template <class Arch>
  POWERSGD_INLINE void project_row(const BandBlock& block, int64_t row, const F* local,
                                   const F* warm, int64_t stride, Vector<Arch, F>& poison) const {
    const Matrix& matrix = arguments.matrix;
    const auto source = arguments.template source<Arch>(block.cols);
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
      source.ask_for(ahead + j);
      Vector<Arch, F> product = p_hat[0] * load<Arch>(local + j);
      POWERSGD_UNROLL
      for (int k = 1; k < kRank; ++k) product += p_hat[k] * load<Arch>(local + k * stride + j);
      const Vector<Arch, F> m = source.combine(offset + j, j, product, poison);
      POWERSGD_UNROLL
      for (int k = 0; k < kRank; ++k) sum[k] += m * load<Arch>(warm + k * stride + j);
    }
    F sums[kRank];
    sums_of_lanes<Arch, F, kRank>(sum, sums);
    F* p = arguments.p() + row * matrix.rank;
    for (int64_t k = 0; k < matrix.rank; ++k) p[k] += sums[k];
  }
};

// In kRows rows, by way of a buffer in the L1 cache, for which the factors are loaded a quarter as
// often.
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
    arguments.clear_p();
    for_each_block(matrix, arguments.walk(), [&](const BandBlock& block) POWERSGD_INLINE_LAMBDA {
      for (int64_t row = block.row_begin; row < block.row_end; row += kRows) {
        alignas(64) F m[kRows * kBlockCols];
        if (kFeedback) multiply_local<Arch>(block, row, local, m);
        combine_rows<Arch>(block, row, m, poison);
        multiply_warm<Arch>(block, row, m, warm);
      }
    });
    arguments.template finish<Arch>(poison);
  }

  // product = p_hat q_local
  template <class Arch>
  POWERSGD_INLINE void multiply_local(const BandBlock& block, int64_t row, PackedFactor<F>& local,
                                      F* product) const {
    const int64_t rank = arguments.matrix.rank;
    const int64_t stride = round_up(block.cols, kPad);
    const int64_t rows = std::min<int64_t>(kRows, block.row_end - row);
    const F* p_hat = arguments.p_hat() + row * rank;
    alignas(64) F left[kRows * kPackedRank];
    for (int64_t k = 0; k == 0 || k < rank; k += kPackedRank) {
      const int64_t count = std::min(kPackedRank, rank - k);
      local.pack(k, count, block.col, block.cols);
      pack_rows(p_hat + k, rank, rows, count, left);
      multiply<Arch, F>(left, local.data(), stride, count, stride, k > 0 ? product : nullptr,
                        StoreBlock<F>{product, stride});
    }
  }

  // m, p_hat q_local so far, becomes M.
  template <class Arch>
  POWERSGD_INLINE void combine_rows(const BandBlock& block, int64_t row, F* m,
                                    Vector<Arch, F>& poison) const {
    const int64_t stride = round_up(block.cols, kPad);
    const int64_t rows = std::min<int64_t>(kRows, block.row_end - row);
    const int64_t cols = arguments.matrix.cols;
    const auto source = arguments.template source<Arch>(block.cols);
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t offset = (row + i) * cols + block.col;
      const int64_t ahead = block.ahead(row + i, cols);
      F* target = m + i * stride;
      for (int64_t j = 0; j < stride; j += kLanes<Arch, F>) {
        source.ask_for(ahead + j);
        const Vector<Arch, F> product = load<Arch>(target + j);
        store<Arch>(target + j, source.combine(offset + j, j, product, poison));
      }
    }
    std::fill(m + rows * stride, m + kRows * stride, F{0});
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
      warm.pack(k, count, block.col, block.cols);
      dot<Arch, F>(m, warm.data(), warm.stride(), count, rows, p + k, rank);
    }
  }
};

}  // namespace powersgd::kernels::cpu
