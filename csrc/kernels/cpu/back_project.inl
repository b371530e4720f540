// SPDX-License-Identifier: BSD-3-Clause
//
// back_project: q_local = p_hat^T M, also written to the Q payload.
#include "kernels/cpu/blocking/bands.h"
#include "kernels/cpu/blocking/products.h"
#include "kernels/cpu/partial_q.h"
#include "kernels/cpu/simd/convert.h"
#include "kernels/cpu/with_storage.h"

namespace powersgd::kernels::cpu::POWERSGD_TARGET {

// Elements of a band. It has more than in project, because one array is read instead of two and
// every band passes over all of q.
constexpr int64_t kBackProjectElements = int64_t{1} << 16;

// A row is prefetched this many rows before it is at work. A prefetch of the next band (bands.h)
// would push this one out of the L1 cache.
constexpr int64_t kRowsAhead = 2 * kRows;

// Returns the first `count` elements of a vector of M. Without a residual M is the gradient, with 0
// where it is not finite.
template <bool kFiniteOnly, class S>
inline Floats load_m(const S* source, int64_t count) {
  const Floats value = load_first(source, count);
  if constexpr (kFiniteOnly) return finite_or_zero(value);
  return value;
}

// kRows rows of M, as accumulate reads them.
template <class S, bool kFiniteOnly>
struct LoadRows {
  const S* m;
  int64_t stride;

  Floats get(int64_t i, int64_t j) const {
    prefetch(m, (i + kRowsAhead) * stride + j);
    return load_m<kFiniteOnly>(m + i * stride + j, kLanes<float>);
  }
};

template <class S, bool kFiniteOnly>
struct BackProjectTile {
  const Bucket& bucket;
  const Matrix& matrix;
  const Tile& tile;
  const S* m;

  POWERSGD_TILE_FUNCTION void run() const {
    float* partial = start_partial_q(bucket, matrix, tile);
    const Region region{tile.row_begin, tile.row_end, tile.col_begin, tile.col_end,
                        kBackProjectElements};
    for_each_block(matrix, region, [&](const BandBlock& block) {
      for (int64_t row = block.row_begin; row < block.row_end; row += kRows) {
        add_rows(block, row, partial + matrix.rank * block.col);
      }
    });
  }

  void add_rows(const BandBlock& block, int64_t row, float* sums) const {
    const int64_t rows = std::min<int64_t>(kRows, block.row_end - row);
    const S* source = m + row * matrix.cols + block.col;
    if (rows == kRows && block.cols % kLanes<float> == 0) {
      add_to_partial_q(matrix, LoadRows<S, kFiniteOnly>{source, matrix.cols}, row, rows, block.cols,
                       sums);
    } else {
      alignas(64) float copy[kRows * kBlockStride];
      copy_rows(source, rows, block.cols, copy);
      add_to_partial_q(matrix, LoadBlock<float>{copy}, row, rows, block.cols, sums);
    }
  }

  // Copies rows that are not whole vectors, padded with zeros.
  void copy_rows(const S* source, int64_t rows, int64_t cols, float* copy) const {
    std::fill_n(copy, kRows * kBlockStride, 0.0f);
    for (int64_t i = 0; i < rows; ++i) {
      const S* from = source + i * matrix.cols;
      float* to = copy + i * kBlockStride;
      for_each_vector(cols, [&](int64_t j, int64_t count) {
        store(to + j, load_m<kFiniteOnly>(from + j, count));
      });
    }
  }
};

inline void back_project_tile(const Bucket& bucket, const Tile& tile) {
  const Matrix& matrix = bucket.matrices[tile.item];
  if (matrix.memory != nullptr) {
    with_residual_storage(bucket.residual_dtype, [&](auto residual) {
      using R = decltype(residual);
      const R* m = static_cast<const R*>(matrix.memory);
      BackProjectTile<R, false>{bucket, matrix, tile, m}.run();
    });
  } else {
    with_storage(bucket.gradient_dtype, [&](auto gradient) {
      using G = decltype(gradient);
      const G* m = elements<G>(bucket.gradient, matrix.gradient_offset);
      BackProjectTile<G, true>{bucket, matrix, tile, m}.run();
    });
  }
}

inline void back_project(const Bucket& bucket, const ParallelFor& parallel_for) {
  if (bucket.state->skipped == 0) {
    for_each_tile(bucket, kBackProjectTiles, parallel_for,
                  [&](const Tile& tile) { back_project_tile(bucket, tile); });
  }
  sum_strips(bucket, parallel_for);
}

}  // namespace powersgd::kernels::cpu::POWERSGD_TARGET
