// SPDX-License-Identifier: BSD-3-Clause
//
// back_project: q_local = p_hat^T M, also written to the Q payload.
#include "kernels/cpu/blocking/bands.h"
#include "kernels/cpu/blocking/products.h"
#include "kernels/cpu/partial_q.h"
#include "kernels/cpu/simd/convert.h"
#include "kernels/cpu/stages.h"

namespace powersgd::kernels::cpu {
namespace {

// Elements of a band: more than where two arrays are read, and every band passes over all of q.
constexpr int64_t kBackProjectElements = int64_t{1} << 16;

// A row is asked for while the one so far ahead of it in the same columns is at work: with one
// array to read, asking for the next band (bands.h) would push this one out of the L1 cache.
constexpr int64_t kRowsAhead = 2 * kRows;

// The first `count` elements of a vector of M. Without memory M is the gradient, with 0 where it is
// not finite.
template <class Arch, class S, bool kFiniteOnly>
POWERSGD_INLINE Vector<Arch, ComputeOf<S>> load_m(const S* source, int64_t count) {
  const Vector<Arch, ComputeOf<S>> value = load_first<Arch>(source, count);
  if constexpr (kFiniteOnly) return finite_or_zero(value);
  return value;
}

// kRows rows of M, as accumulate reads them.
template <class Arch, class S, bool kFiniteOnly>
struct LoadRows {
  const S* m;
  int64_t stride;

  template <class>
  POWERSGD_INLINE Vector<Arch, ComputeOf<S>> get(int64_t i, int64_t j) const {
    prefetch(m, (i + kRowsAhead) * stride + j);
    return load_m<Arch, S, kFiniteOnly>(m + i * stride + j, kLanes<Arch, ComputeOf<S>>);
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
    F* partial = start_partial_q<F>(bucket, matrix, tile);
    const Walk walk{tile.row_begin, tile.row_end, tile.col_begin, tile.col_end,
                    kBackProjectElements};
    for_each_block(matrix, walk, [&](const BandBlock& block) POWERSGD_INLINE_LAMBDA {
      for (int64_t row = block.row_begin; row < block.row_end; row += kRows) {
        add_rows<Arch>(block, row, partial + matrix.rank * block.col);
      }
    });
  }

  template <class Arch>
  POWERSGD_INLINE void add_rows(const BandBlock& block, int64_t row, F* sums) const {
    const int64_t rows = std::min<int64_t>(kRows, block.row_end - row);
    const S* source = m + row * matrix.cols + block.col;
    if (rows == kRows && block.cols % kLanes<Arch, F> == 0) {
      add_to_partial_q<Arch>(matrix, LoadRows<Arch, S, kFiniteOnly>{source, matrix.cols}, row, rows,
                             block.cols, sums);
    } else {
      alignas(64) F copy[kRows * kBlockStride];
      copy_rows<Arch>(source, rows, block.cols, copy);
      add_to_partial_q<Arch>(matrix, LoadBlock<F>{copy}, row, rows, block.cols, sums);
    }
  }

  // Copies rows that are not whole vectors, padded with zeros.
  template <class Arch>
  POWERSGD_INLINE void copy_rows(const S* source, int64_t rows, int64_t cols, F* copy) const {
    std::fill_n(copy, kRows * kBlockStride, F{0});
    for (int64_t i = 0; i < rows; ++i) {
      const S* from = source + i * matrix.cols;
      F* to = copy + i * kBlockStride;
      for_each_vector<Arch, F>(cols, [&](int64_t j, int64_t count) POWERSGD_INLINE_LAMBDA {
        store<Arch>(to + j, load_m<Arch, S, kFiniteOnly>(from + j, count));
      });
    }
  }
};

void back_project_tile(Isa isa, const Bucket& bucket, const Tile& tile) {
  const Matrix& matrix = bucket.matrices[tile.item];
  if (matrix.memory != nullptr) {
    with_storage(bucket.residual_dtype, [&](auto residual) {
      using R = decltype(residual);
      run_on(isa,
             BackProjectTile<R, false>{bucket, matrix, tile, static_cast<const R*>(matrix.memory)});
    });
  } else {
    with_storage(bucket.gradient_dtype, [&](auto gradient) {
      using G = decltype(gradient);
      run_on(isa, BackProjectTile<G, true>{bucket, matrix, tile,
                                           elements<G>(bucket.gradient, matrix.gradient_offset)});
    });
  }
}

// q is 0 if the step is skipped or the matrix is out of use, so that its residual stays.
template <class F>
void sum_what_is_sent(Isa isa, const Bucket& bucket, const ParallelFor& parallel_for) {
  sum_strips<F>(isa, bucket, parallel_for, [&](const Matrix& matrix) {
    return bucket.verdict->skipped != 0 || out_of_use<F>(bucket, matrix);
  });
}

}  // namespace

void back_project(Isa isa, const Bucket& bucket, const ParallelFor& parallel_for) {
  if (bucket.verdict->skipped == 0) {
    for_each_tile(bucket, kBackProjectTiles, parallel_for,
                  [&](const Tile& tile) { back_project_tile(isa, bucket, tile); });
  }
  if (bucket.factor_dtype == DType::kFloat64) {
    sum_what_is_sent<double>(isa, bucket, parallel_for);
  } else {
    sum_what_is_sent<float>(isa, bucket, parallel_for);
  }
}

void back_project(const Bucket& bucket, const ParallelFor& parallel_for) {
  back_project(best_isa(), bucket, parallel_for);
}

}  // namespace powersgd::kernels::cpu
