// SPDX-License-Identifier: BSD-3-Clause
//
// back_project: q_local = p_hat^T M, also written to the Q payload.
//
// A tile owns a range of rows and a strip of columns and adds up their partial q. A second pass
// adds the partial q of a strip in the order of the rows, so that the sum does not depend on who
// computed what.
#include "bands.h"
#include "blocks.h"
#include "convert.h"

namespace powersgd::kernels::cpu {
namespace {

// Elements of a band: more than where two arrays are read, and every band passes over all of q.
constexpr int64_t kBackProjectElements = int64_t{1} << 15;

// One vector of M. Without memory M is the gradient, with 0 where it is not finite.
template <class Arch, class S, bool kFiniteOnly>
POWERSGD_INLINE Vector<Arch, ComputeOf<S>> load_m(const S* source) {
  const Vector<Arch, ComputeOf<S>> value = load_as<Arch>(source);
  const Vector<Arch, ComputeOf<S>> zero = {};
  if constexpr (kFiniteOnly) return value - value == zero ? value : zero;
  return value;
}

// kRows rows of M, as accumulate reads them.
template <class Arch, class S, bool kFiniteOnly>
struct LoadRows {
  const S* m;
  int64_t stride;

  template <class>
  POWERSGD_INLINE Vector<Arch, ComputeOf<S>> get(int64_t i, int64_t j) const {
    return load_m<Arch, S, kFiniteOnly>(m + i * stride + j);
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
    const int64_t part = tile.row_begin / back_project_rows(matrix);
    F* partial = slot_pointer<F>(bucket, tile.slot) + part * partial_q_numel(matrix);
    std::fill(partial + matrix.rank * tile.col_begin,
              partial + matrix.rank * round_up(tile.col_end, kBlockCols), F{0});
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
    for (int64_t i = 0; i < rows; ++i) ask_for(block.ahead(row + i, matrix.cols), block.cols);
    if (rows == kRows && block.cols % kLanes<Arch, F> == 0) {
      add<Arch>(LoadRows<Arch, S, kFiniteOnly>{source, matrix.cols}, row, rows, block.cols, sums);
    } else {
      alignas(64) F copy[kRows * kBlockCols];
      copy_rows<Arch>(source, rows, block.cols, copy);
      add<Arch>(LoadBlock<F>{copy, kBlockCols}, row, rows, block.cols, sums);
    }
  }

  POWERSGD_INLINE void ask_for(int64_t offset, int64_t cols) const {
    constexpr auto kLine = static_cast<int64_t>(64 / sizeof(S));
    for (int64_t j = 0; j < cols; j += kLine) prefetch(m, offset + j);
  }

  template <class Arch, class Source>
  POWERSGD_INLINE void add(const Source& source, int64_t row, int64_t rows, int64_t cols,
                           F* sums) const {
    const F* p_hat = static_cast<const F*>(matrix.p_hat) + row * matrix.rank;
    alignas(64) F left[kRows * kPackedRank];
    for (int64_t k = 0; k < matrix.rank; k += kPackedRank) {
      const int64_t count = std::min(kPackedRank, matrix.rank - k);
      pack_rows(p_hat + k, matrix.rank, rows, count, left);
      accumulate<Arch, F>(left, source, count, cols, sums + k * kBlockCols, kBlockCols);
    }
  }

  // What is not whole vectors, padded with zeros.
  template <class Arch>
  POWERSGD_INLINE void copy_rows(const S* source, int64_t rows, int64_t cols, F* copy) const {
    constexpr int64_t kLane = kLanes<Arch, F>;
    std::fill_n(copy, kRows * kBlockCols, F{0});
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < cols; j += kLane) {
        const S* from = source + i * matrix.cols + j;
        F* to = copy + i * kBlockCols + j;
        if (j + kLane <= cols) {
          store<Arch>(to, load_m<Arch, S, kFiniteOnly>(from));
        } else {
          const Padded<Arch, S> last(from, cols - j);
          store<Arch>(to, load_m<Arch, S, kFiniteOnly>(last.data));
        }
      }
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

// Whether every rank's gradient of the matrix is zero. Its q is then 0: what it is owed stays owed.
template <class F>
bool out_of_use(const Bucket& bucket, const Matrix& matrix) {
  return matrix.active_offset >= 0 && elements<F>(bucket.p_payload, matrix.active_offset)[0] == 0;
}

// q of a strip: the sum of its partial q, or 0 if the step is skipped or the matrix out of use.
template <class F>
struct SumStrip {
  const Bucket& bucket;
  const Matrix& matrix;
  const Tile& tile;

  template <class Arch>
  POWERSGD_INLINE void run() const {
    const bool skipped = bucket.verdict->skipped != 0 || out_of_use<F>(bucket, matrix);
    const int64_t parts = skipped ? 0 : count_parts(matrix.rows, back_project_rows(matrix));
    const F* partial = slot_pointer<F>(bucket, tile.slot);
    F* payload = elements<F>(bucket.q_payload, matrix.q_offset);
    for (int64_t k = 0; k < matrix.rank; ++k) {
      for (int64_t j = tile.col_begin; j < tile.col_end; j += kPad) {
        const int64_t count = std::min(kPad, tile.col_end - j);
        const int64_t block = j / kBlockCols * kBlockCols;
        F sums[kPad];
        add_parts<Arch>(partial + matrix.rank * block + k * kBlockCols + j - block, parts,
                        partial_q_numel(matrix), sums);
        const int64_t target = k * matrix.cols + j;
        std::copy_n(sums, count, payload + target);
        if (matrix.q_local != nullptr) {
          std::copy_n(sums, count, static_cast<F*>(matrix.q_local) + target);
        }
      }
    }
  }

  // kPad elements.
  template <class Arch>
  POWERSGD_INLINE void add_parts(const F* partial, int64_t parts, int64_t part_stride,
                                 F* sums) const {
    constexpr int64_t kLane = kLanes<Arch, F>;
    Vector<Arch, F> sum[kPad / kLane] = {};
    for (int64_t part = 0; part < parts; ++part) {
      POWERSGD_UNROLL
      for (int64_t i = 0; i < kPad / kLane; ++i) {
        sum[i] += load<Arch, F>(partial + part * part_stride + i * kLane);
      }
    }
    POWERSGD_UNROLL
    for (int64_t i = 0; i < kPad / kLane; ++i) store<Arch, F>(sums + i * kLane, sum[i]);
  }
};

}  // namespace

void back_project(Isa isa, const Bucket& bucket, const ParallelFor& parallel_for) {
  if (bucket.verdict->skipped == 0) {
    for_each_tile(bucket, kBackProjectTiles, parallel_for,
                  [&](const Tile& tile) { back_project_tile(isa, bucket, tile); });
  }
  for_each_tile(bucket, kStripTiles, parallel_for, [&](const Tile& tile) {
    const Matrix& matrix = bucket.matrices[tile.item];
    if (bucket.factor_dtype == DType::kFloat64) {
      run_on(isa, SumStrip<double>{bucket, matrix, tile});
    } else {
      run_on(isa, SumStrip<float>{bucket, matrix, tile});
    }
  });
}

void back_project(const Bucket& bucket, const ParallelFor& parallel_for) {
  back_project(best_isa(), bucket, parallel_for);
}

}  // namespace powersgd::kernels::cpu
