// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/cpu/blocking/tiles.h"
#include "kernels/cpu/simd/vector.h"

// A stage goes over its part of a matrix strip by strip, over a strip band by band, and over a band
// block by block (tiles.h). While one band is processed, the next is prefetched front to back, the
// order that hardware prefetchers follow.
namespace powersgd::kernels::cpu::POWERSGD_TARGET {

struct BandBlock {
  int64_t row_begin, row_end;
  int64_t col;
  int64_t cols;

  // The next band, and the parts of kBlockCols columns that it consists of.
  int64_t index;  // of this block in its band
  int64_t col_begin;
  int64_t blocks;

  // Returns the element (row, column) to prefetch while the first element of `row` in this block is
  // at work, as an offset from the first element of the matrix.
  int64_t ahead(int64_t row, int64_t matrix_cols) const {
    const int64_t part = index * (row_end - row_begin) + row - row_begin;
    return (row_end + part / blocks) * matrix_cols + col_begin + part % blocks * kBlockCols;
  }
};

// Prefetches to the L2 cache, because the L1 cache can have few loads in flight. Does nothing if
// there is no such memory.
template <class T>
inline void prefetch(const T* base, int64_t offset) {
  constexpr int kRead = 0, kSecondLevel = 2;
  const auto bytes = static_cast<uintptr_t>(offset) * sizeof(T);
  __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(base) + bytes),
                     kRead, kSecondLevel);
}

// Rows [row_begin, row_end) x columns [col_begin, col_end) of a matrix, and how to cut them.
struct Region {
  int64_t row_begin, row_end;
  int64_t col_begin, col_end;
  int64_t band_elements = kBandElements;
  int64_t first_cols = kBlockCols;  // columns of the first block of each band
};

// Calls visit(block) for each block.
template <class Visit>
inline void for_each_block(const Matrix& matrix, const Region& region, const Visit& visit) {
  const int64_t strip = strip_cols(matrix);
  for (int64_t left = region.col_begin; left < region.col_end; left += strip) {
    const int64_t right = std::min(left + strip, region.col_end);
    const int64_t first = left + std::min(region.first_cols, right - left);
    const int64_t blocks = 1 + ceil_div(right - first, kBlockCols);
    const int64_t height = band_rows(matrix, region.band_elements / (right - left));
    for (int64_t row = region.row_begin; row < region.row_end; row += height) {
      const int64_t row_end = std::min(row + height, region.row_end);
      for (int64_t i = 0; i < blocks; ++i) {
        const int64_t col = i == 0 ? left : first + (i - 1) * kBlockCols;
        const int64_t col_end = std::min(first + i * kBlockCols, right);
        visit(BandBlock{row, row_end, col, col_end - col, i, left, blocks});
      }
    }
  }
}

}  // namespace powersgd::kernels::cpu::POWERSGD_TARGET
