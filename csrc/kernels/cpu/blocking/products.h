// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>

#include "kernels/cpu/blocking/tiles.h"
#include "kernels/cpu/simd/convert.h"
#include "kernels/cpu/simd/instructions.h"
#include "kernels/cpu/simd/lane_sums.h"
#include "kernels/cpu/simd/vector.h"

// The products of the stages: kRows rows with a block of columns that is padded with zeros to a
// multiple of kPad, so there are no remainders here. Missing rows are zero too, so a row's result
// does not depend on how many rows it is handled with.
namespace powersgd::kernels::cpu::POWERSGD_TARGET {

// How a product is added to a sum. Results that all ranks must agree on are kReproducible; a CPU
// without FMA is slow at it.
enum class Rounding { kFastest, kReproducible };

template <Rounding kRounding, class V>
inline V add_product(V sum, V a, V b) {
  if constexpr (kRounding == Rounding::kReproducible) {
    return multiply_add_reproducibly(a, b, sum);
  } else {
    return multiply_add(a, b, sum);
  }
}

// Part of a [rank, cols] factor, its rows kBlockStride apart. Rows that are never packed are 0.
template <int64_t kCapacity = kPackedRank>
class PackedFactor {
 public:
  PackedFactor(const void* factor, int64_t factor_stride)
      : factor_(static_cast<const float*>(factor)), factor_stride_(factor_stride) {}

  // Holds rows [k, k + count) x columns [col, col + cols) from now on.
  void pack(int64_t k, int64_t count, int64_t col, int64_t cols) {
    if (k == k_ && col == col_) return;
    k_ = k;
    col_ = col;
    for (int64_t i = 0; i < count; ++i) {
      float* row = data_ + i * kBlockStride;
      const float* source = factor_ + (k + i) * factor_stride_ + col;
      for_each_vector(
          cols, [&](int64_t j, int64_t size) { store(row + j, load_first(source + j, size)); });
      std::fill(row + round_up(cols, kLanes<float>), row + round_up(cols, kPad), 0.0f);
    }
  }

  const float* data() const { return data_; }

 private:
  alignas(64) float data_[kCapacity * kBlockStride] = {};
  const float* factor_;
  int64_t factor_stride_;
  int64_t k_ = -1;
  int64_t col_ = -1;
};

// Packs the first `count` columns of up to kRows rows of a row-major matrix, as [count, kRows],
// times `scale`.
inline void pack_rows(const float* source, int64_t source_stride, int64_t rows, int64_t count,
                      float scale, float* packed) {
  for (int64_t i = 0; i < kRows; ++i) {
    for (int64_t k = 0; k < count; ++k) {
      packed[k * kRows + i] = i < rows ? scale * source[i * source_stride + k] : 0;
    }
  }
}

template <Rounding kRounding, int kWidth, class F, class Sink>
inline void multiply_columns(const F* left, const F* right, int64_t right_stride, int64_t rank,
                             const F* initial, int64_t j, const Sink& sink) {
  constexpr int64_t kLane = kLanes<F>;
  Vector<F> sum[kRows][kWidth] = {};
  if (initial != nullptr) {
    POWERSGD_UNROLL
    for (int i = 0; i < kRows; ++i) {
      POWERSGD_UNROLL
      for (int w = 0; w < kWidth; ++w) {
        sum[i][w] = load(initial + i * right_stride + j + w * kLane);
      }
    }
  }
  for (int64_t k = 0; k < rank; ++k) {
    Vector<F> b[kWidth];
    POWERSGD_UNROLL
    for (int w = 0; w < kWidth; ++w) b[w] = load(right + k * right_stride + j + w * kLane);
    POWERSGD_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const Vector<F> a = broadcast(left[k * kRows + i]);
      POWERSGD_UNROLL
      for (int w = 0; w < kWidth; ++w) sum[i][w] = add_product<kRounding>(sum[i][w], a, b[w]);
    }
  }
  POWERSGD_UNROLL
  for (int i = 0; i < kRows; ++i) sink.put(i, j, sum[i]);
}

// Hands the sum over k of left[k, i] * right[k, j], added in the order of k, to the sink: one or
// more vectors of each of kRows rows at a time, by sink.put(row, column, vectors). Starts from
// `initial`, if there is one, with the stride of `right`.
template <Rounding kRounding, class F, class Sink>
inline void multiply(const F* left, const F* right, int64_t right_stride, int64_t rank,
                     int64_t cols, const F* initial, const Sink& sink) {
  constexpr int64_t kLane = kLanes<F>;
  constexpr int kWidth = kRegisters == 32 ? 4 : 2;
  int64_t j = 0;
  for (; j + kWidth * kLane <= cols; j += kWidth * kLane) {
    multiply_columns<kRounding, kWidth>(left, right, right_stride, rank, initial, j, sink);
  }
  for (; j < cols; j += kLane) {
    multiply_columns<kRounding, 1>(left, right, right_stride, rank, initial, j, sink);
  }
}

// The sink that keeps the product.
template <class F>
struct StoreBlock {
  F* block;
  int64_t stride = kBlockStride;

  template <int kWidth>
  void put(int64_t i, int64_t j, const Vector<F> (&values)[kWidth]) const {
    POWERSGD_UNROLL
    for (int w = 0; w < kWidth; ++w) store(block + i * stride + j + w * kLanes<F>, values[w]);
  }
};

template <int kCount>
inline void dot_columns(const float* block, const float* right, int64_t cols, int64_t rows,
                        float* sums, int64_t sums_stride) {
  Floats sum[kRows * kCount] = {};
  for (int64_t j = 0; j < cols; j += kLanes<float>) {
    Floats b[kCount];
    POWERSGD_UNROLL
    for (int k = 0; k < kCount; ++k) b[k] = load(right + k * kBlockStride + j);
    POWERSGD_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const Floats a = load(block + i * kBlockStride + j);
      POWERSGD_UNROLL
      for (int k = 0; k < kCount; ++k) {
        sum[i * kCount + k] = multiply_add(a, b[k], sum[i * kCount + k]);
      }
    }
  }
  float lane_sums[kRows * kCount];
  sums_of_lanes<kRows * kCount>(sum, lane_sums);
  for (int64_t i = 0; i < rows; ++i) {
    POWERSGD_UNROLL
    for (int k = 0; k < kCount; ++k) sums[i * sums_stride + k] += lane_sums[i * kCount + k];
  }
}

// sums[i, k] += the sum over j of block[i, j] * right[k, j], over `cols` columns, padding included,
// in the first `rows` of kRows rows.
inline void dot(const float* block, const float* right, int64_t cols, int64_t rank, int64_t rows,
                float* sums, int64_t sums_stride) {
  constexpr int kMost = kRegisters == 32 ? 4 : 2;
  int64_t k = 0;
  for (; k + kMost <= rank; k += kMost) {
    dot_columns<kMost>(block, right + k * kBlockStride, cols, rows, sums + k, sums_stride);
  }
  if (kMost > 2 && k + 2 <= rank) {
    dot_columns<2>(block, right + k * kBlockStride, cols, rows, sums + k, sums_stride);
    k += 2;
  }
  if (k < rank) {
    dot_columns<1>(block, right + k * kBlockStride, cols, rows, sums + k, sums_stride);
  }
}

// The source that reads rows of a padded block.
template <class F>
struct LoadBlock {
  const F* block;
  int64_t stride = kBlockStride;

  Vector<F> get(int64_t i, int64_t j) const { return load(block + i * stride + j); }
};

template <Rounding kRounding, int kCount, class F, class Source>
inline void accumulate_rows(const F* left, const Source& source, int64_t cols, F* sums,
                            int64_t sums_stride) {
  Vector<F> a[kCount][kRows];
  POWERSGD_UNROLL
  for (int k = 0; k < kCount; ++k) {
    POWERSGD_UNROLL
    for (int i = 0; i < kRows; ++i) a[k][i] = broadcast(left[k * kRows + i]);
  }
  for (int64_t j = 0; j < cols; j += kLanes<F>) {
    Vector<F> sum[kCount];
    POWERSGD_UNROLL
    for (int k = 0; k < kCount; ++k) sum[k] = load(sums + k * sums_stride + j);
    POWERSGD_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const Vector<F> b = source.get(i, j);
      POWERSGD_UNROLL
      for (int k = 0; k < kCount; ++k) sum[k] = add_product<kRounding>(sum[k], a[k][i], b);
    }
    POWERSGD_UNROLL
    for (int k = 0; k < kCount; ++k) store(sums + k * sums_stride + j, sum[k]);
  }
}

// sums[k, j] += the sum over i of left[k, i] * source[i, j], added in the order of i, over whole
// vectors up to `cols`. source.get(i, j) is a vector of row i.
template <Rounding kRounding, class F, class Source>
inline void accumulate(const F* left, const Source& source, int64_t rank, int64_t cols, F* sums,
                       int64_t sums_stride) {
  constexpr int kMost = kRegisters == 32 ? 4 : 2;
  int64_t k = 0;
  for (; k + kMost <= rank; k += kMost) {
    accumulate_rows<kRounding, kMost>(left + k * kRows, source, cols, sums + k * sums_stride,
                                      sums_stride);
  }
  if (kMost > 2 && k + 2 <= rank) {
    accumulate_rows<kRounding, 2>(left + k * kRows, source, cols, sums + k * sums_stride,
                                  sums_stride);
    k += 2;
  }
  if (k < rank) {
    accumulate_rows<kRounding, 1>(left + k * kRows, source, cols, sums + k * sums_stride,
                                  sums_stride);
  }
}

}  // namespace powersgd::kernels::cpu::POWERSGD_TARGET
