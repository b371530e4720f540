// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>

#include "simd.h"
#include "tiles.h"

// The micro-kernels of the stages: products of kRows rows with a block of columns that is padded with
// zeros to a multiple of kPad, so that there are no remainders here. Missing rows are zero as well,
// which keeps a row's result apart from the number of rows it is handled with.
namespace powersgd::kernels::cpu {

// Part of a [rank, cols] factor without gaps between its rows: rows a power of two apart would fall
// into the same cache sets.
template <class F>
class PackedFactor {
 public:
  PackedFactor(const void* factor, int64_t factor_stride)
      : factor_(static_cast<const F*>(factor)), factor_stride_(factor_stride) {}

  // Holds rows [k, k + count) x columns [col, col + cols) from now on.
  POWERSGD_INLINE void pack(int64_t k, int64_t count, int64_t col, int64_t cols) {
    if (k == k_ && col == col_) return;
    k_ = k;
    col_ = col;
    stride_ = round_up(cols, kPad);
    for (int64_t i = 0; i < count; ++i) {
      F* row = data_ + i * stride_;
      std::copy_n(factor_ + (k + i) * factor_stride_ + col, cols, row);
      std::fill(row + cols, row + stride_, F{0});
    }
  }

  const F* data() const { return data_; }
  int64_t stride() const { return stride_; }

 private:
  alignas(64) F data_[kPackedElements];
  const F* factor_;
  int64_t factor_stride_;
  int64_t stride_ = 0;
  int64_t k_ = -1;
  int64_t col_ = -1;
};

// The first `count` columns of up to kRows rows of a row-major matrix, as [count, kRows].
template <class F, class Source>
POWERSGD_INLINE void pack_rows(const Source* source, int64_t source_stride, int64_t rows,
                               int64_t count, F* packed) {
  for (int64_t i = 0; i < kRows; ++i) {
    for (int64_t k = 0; k < count; ++k) {
      packed[k * kRows + i] = i < rows ? static_cast<F>(source[i * source_stride + k]) : F{0};
    }
  }
}

template <class Arch, class F, int kWidth>
POWERSGD_INLINE void multiply_columns(const F* left, const F* right, int64_t right_stride,
                                      int64_t rank, bool accumulate, F* out, int64_t out_stride) {
  constexpr int64_t kLane = kLanes<Arch, F>;
  Vector<Arch, F> sum[kRows][kWidth] = {};
  if (accumulate) {
    POWERSGD_UNROLL
    for (int i = 0; i < kRows; ++i) {
      POWERSGD_UNROLL
      for (int w = 0; w < kWidth; ++w) {
        sum[i][w] = load<Arch, F>(out + i * out_stride + w * kLane);
      }
    }
  }
  for (int64_t k = 0; k < rank; ++k) {
    Vector<Arch, F> b[kWidth];
    POWERSGD_UNROLL
    for (int w = 0; w < kWidth; ++w) b[w] = load<Arch, F>(right + k * right_stride + w * kLane);
    POWERSGD_UNROLL
    for (int i = 0; i < kRows; ++i) {
      POWERSGD_UNROLL
      for (int w = 0; w < kWidth; ++w) sum[i][w] += left[k * kRows + i] * b[w];
    }
  }
  POWERSGD_UNROLL
  for (int i = 0; i < kRows; ++i) {
    POWERSGD_UNROLL
    for (int w = 0; w < kWidth; ++w) {
      store<Arch, F>(out + i * out_stride + w * kLane, sum[i][w]);
    }
  }
}

// out[i, j] (+)= sum over k of left[k, i] * right[k, j], added in the order of k.
template <class Arch, class F>
POWERSGD_INLINE void multiply(const F* left, const F* right, int64_t right_stride, int64_t rank,
                              int64_t cols, bool accumulate, F* out, int64_t out_stride) {
  constexpr int64_t kLane = kLanes<Arch, F>;
  constexpr int kWidth = Arch::kRegisters == 32 ? 4 : 2;
  int64_t j = 0;
  for (; j + kWidth * kLane <= cols; j += kWidth * kLane) {
    multiply_columns<Arch, F, kWidth>(left, right + j, right_stride, rank, accumulate, out + j,
                                      out_stride);
  }
  for (; j < cols; j += kLane) {
    multiply_columns<Arch, F, 1>(left, right + j, right_stride, rank, accumulate, out + j,
                                 out_stride);
  }
}

template <class Arch, class F, int kCount>
POWERSGD_INLINE void dot_columns(const F* block, int64_t block_stride, const F* right,
                                 int64_t right_stride, int64_t cols, F* sums) {
  constexpr int64_t kLane = kLanes<Arch, F>;
  Vector<Arch, F> sum[kRows][kCount] = {};
  for (int64_t j = 0; j < cols; j += kLane) {
    Vector<Arch, F> b[kCount];
    POWERSGD_UNROLL
    for (int k = 0; k < kCount; ++k) b[k] = load<Arch, F>(right + k * right_stride + j);
    POWERSGD_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const Vector<Arch, F> a = load<Arch, F>(block + i * block_stride + j);
      POWERSGD_UNROLL
      for (int k = 0; k < kCount; ++k) sum[i][k] += a * b[k];
    }
  }
  POWERSGD_UNROLL
  for (int k = 0; k < kCount; ++k) {
    POWERSGD_UNROLL
    for (int i = 0; i < kRows; ++i) {
      sums[k * kRows + i] = sum_of_lanes<F, Arch::kVectorBytes>(sum[i][k]);
    }
  }
}

// sums[k, i] = sum over j of block[i, j] * right[k, j].
template <class Arch, class F>
POWERSGD_INLINE void dot(const F* block, int64_t block_stride, const F* right, int64_t right_stride,
                         int64_t rank, int64_t cols, F* sums) {
  constexpr int kMost = Arch::kRegisters == 32 ? 4 : 2;
  int64_t k = 0;
  for (; k + kMost <= rank; k += kMost) {
    dot_columns<Arch, F, kMost>(block, block_stride, right + k * right_stride, right_stride, cols,
                                sums + k * kRows);
  }
  if (kMost > 2 && k + 2 <= rank) {
    dot_columns<Arch, F, 2>(block, block_stride, right + k * right_stride, right_stride, cols,
                            sums + k * kRows);
    k += 2;
  }
  if (k < rank) {
    dot_columns<Arch, F, 1>(block, block_stride, right + k * right_stride, right_stride, cols,
                            sums + k * kRows);
  }
}

template <class Arch, class F, int kCount>
POWERSGD_INLINE void accumulate_rows(const F* left, const F* block, int64_t block_stride,
                                     int64_t cols, F* sums, int64_t sums_stride) {
  constexpr int64_t kLane = kLanes<Arch, F>;
  Vector<Arch, F> a[kCount][kRows];
  POWERSGD_UNROLL
  for (int k = 0; k < kCount; ++k) {
    POWERSGD_UNROLL
    for (int i = 0; i < kRows; ++i) a[k][i] = Vector<Arch, F>{} + left[k * kRows + i];
  }
  for (int64_t j = 0; j < cols; j += kLane) {
    Vector<Arch, F> sum[kCount];
    POWERSGD_UNROLL
    for (int k = 0; k < kCount; ++k) sum[k] = load<Arch, F>(sums + k * sums_stride + j);
    POWERSGD_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const Vector<Arch, F> b = load<Arch, F>(block + i * block_stride + j);
      POWERSGD_UNROLL
      for (int k = 0; k < kCount; ++k) sum[k] += a[k][i] * b;
    }
    POWERSGD_UNROLL
    for (int k = 0; k < kCount; ++k) store<Arch, F>(sums + k * sums_stride + j, sum[k]);
  }
}

// sums[k, j] += sum over i of left[k, i] * block[i, j], added in the order of i.
template <class Arch, class F>
POWERSGD_INLINE void accumulate(const F* left, const F* block, int64_t block_stride, int64_t rank,
                                int64_t cols, F* sums, int64_t sums_stride) {
  constexpr int kMost = Arch::kRegisters == 32 ? 4 : 2;
  int64_t k = 0;
  for (; k + kMost <= rank; k += kMost) {
    accumulate_rows<Arch, F, kMost>(left + k * kRows, block, block_stride, cols,
                                    sums + k * sums_stride, sums_stride);
  }
  if (kMost > 2 && k + 2 <= rank) {
    accumulate_rows<Arch, F, 2>(left + k * kRows, block, block_stride, cols,
                                sums + k * sums_stride, sums_stride);
    k += 2;
  }
  if (k < rank) {
    accumulate_rows<Arch, F, 1>(left + k * kRows, block, block_stride, cols,
                                sums + k * sums_stride, sums_stride);
  }
}

}  // namespace powersgd::kernels::cpu
