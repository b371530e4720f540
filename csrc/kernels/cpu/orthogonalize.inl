// SPDX-License-Identifier: BSD-3-Clause
//
// orthogonalize: p_hat = orth(P), for all matrices of a bucket, by Cholesky-QR.
//
// There are up to kMaxPasses passes over the matrices that still need one:
//   1. The Gram matrices are summed in double, in parts that are fixed ranges of rows.
//   2. The transforms follow from them (cholesky_qr.h).
//   3. p_hat = P transform, row by row in double. Later passes start from p_hat instead of P.
// A dead column of p_hat is 0. So is the row of Q that follows from it, which tells reconstruct.
// Each row of p_hat depends on that row of P alone, so rows of zeros stay zeros.
//
// All ranks must get the same bits: sums are taken in the order of the rows, which are never spread
// over the lanes of a vector.
#include "kernels/cpu/blocking/products.h"
#include "kernels/cpu/cholesky_qr.h"

namespace powersgd::kernels::cpu::POWERSGD_TARGET {

// Holds kRows rows of a matrix in double, each padded with zeros.
struct RowGroup {
  alignas(64) double rows[kRows * kMaxRank];
  alignas(64) double columns[kRows * kMaxRank];  // the same as [rank, kRows]

  void load_rows(const TallFactor& source, int64_t row, int64_t count, int64_t rank,
                 int64_t stride) {
    for (int64_t i = 0; i < kRows; ++i) {
      for (int64_t k = 0; k < rank; ++k) {
        rows[i * stride + k] = i < count ? static_cast<double>(source.at(row + i, k)) : 0;
        columns[k * kRows + i] = rows[i * stride + k];
      }
      std::fill(rows + i * stride + rank, rows + (i + 1) * stride, 0.0);
    }
  }
};

POWERSGD_TILE_FUNCTION inline void add_gram_tile(const Matrix& matrix, const Tile& tile,
                                                 const TallFactor& source, double* partial) {
  const int64_t rank = matrix.rank;
  const int64_t stride = OrthogonalizeLayout(matrix).stride;
  RowGroup group;
  std::fill_n(partial, rank * stride, 0.0);
  for (int64_t row = tile.row_begin; row < tile.row_end; row += kRows) {
    group.load_rows(source, row, std::min<int64_t>(kRows, tile.row_end - row), rank, stride);
    accumulate<Rounding::kReproducible>(group.columns, LoadBlock<double>{group.rows, stride}, rank,
                                        stride, partial, stride);
  }
}

// p_hat = source transform, in the rows of a tile.
POWERSGD_TILE_FUNCTION inline void transform_tile(const Matrix& matrix, const Tile& tile,
                                                  const TallFactor& source,
                                                  const FactorSpace& space) {
  const int64_t rank = matrix.rank;
  const int64_t stride = space.layout.stride;
  const TallFactor p_hat = p_hat_of(matrix);
  RowGroup group;
  for (int64_t row = tile.row_begin; row < tile.row_end; row += kRows) {
    const int64_t rows = std::min<int64_t>(kRows, tile.row_end - row);
    group.load_rows(source, row, rows, rank, stride);
    multiply<Rounding::kReproducible>(group.columns, space.transform, stride, rank, stride,
                                      static_cast<const double*>(nullptr),
                                      StoreBlock<double>{group.rows, stride});
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t k = 0; k < rank; ++k) {
        p_hat.at(row + i, k) = static_cast<float>(group.rows[i * stride + k]);
      }
    }
  }
}

class Orthogonalizer {
 public:
  Orthogonalizer(const Bucket& bucket, const ParallelFor& parallel_for)
      : bucket_(bucket), parallel_for_(parallel_for) {}

  // Returns whether the step is to be skipped, which is known before anything is written.
  bool run() {
    const float count = elements<float>(bucket_.p_payload, bucket_.p_numel - 1)[0];
    if (!(count == 0)) return true;
    for (int pass = 0; pass < kMaxPasses; ++pass) {
      compute_gram(pass);
      compute_transforms(pass);
      if (!all_of_matrices([](const FactorState& state) { return state.finite != 0; })) return true;
      transform(pass);
      if (all_of_matrices([&](const FactorState& state) { return state.last_pass <= pass; })) break;
    }
    return false;
  }

 private:
  TallFactor source(const Matrix& matrix, int pass) const {
    return pass > 0 ? p_hat_of(matrix) : p_of(bucket_, matrix);
  }

  FactorSpace space(const Tile& tile) const {
    return FactorSpace(bucket_, bucket_.matrices[tile.item], tile.slot);
  }

  static bool takes_part(const FactorSpace& space, int pass) {
    return pass == 0 || pass <= space.state->last_pass;
  }

  void compute_gram(int pass) {
    for_each_tile(bucket_, kGramTiles, parallel_for_, [&](const Tile& tile) {
      const FactorSpace factor = space(tile);
      if (!takes_part(factor, pass)) return;
      const Matrix& matrix = bucket_.matrices[tile.item];
      double* partial = factor.partial(tile.row_begin / gram_rows(matrix));
      add_gram_tile(matrix, tile, source(matrix, pass), partial);
    });
  }

  void compute_transforms(int pass) {
    for_each_tile(bucket_, kFactorTiles, parallel_for_, [&](const Tile& tile) {
      const FactorSpace factor = space(tile);
      if (!takes_part(factor, pass)) return;
      FactorMatrix{factor, bucket_.matrices[tile.item].rank, bucket_.epsilon, kWeakPivot, pass}
          .run();
    });
  }

  void transform(int pass) {
    for_each_tile(bucket_, kGramTiles, parallel_for_, [&](const Tile& tile) {
      const FactorSpace factor = space(tile);
      if (!takes_part(factor, pass)) return;
      const Matrix& matrix = bucket_.matrices[tile.item];
      if (out_of_use(bucket_, matrix)) return;
      transform_tile(matrix, tile, source(matrix, pass), factor);
    });
  }

  template <class Predicate>
  bool all_of_matrices(const Predicate& predicate) const {
    const Tile* begin = bucket_.tiles + bucket_.tile_list_begin[kFactorTiles];
    const Tile* end = bucket_.tiles + bucket_.tile_list_begin[kFactorTiles + 1];
    return std::all_of(begin, end, [&](const Tile& tile) { return predicate(*space(tile).state); });
  }

  const Bucket& bucket_;
  const ParallelFor& parallel_for_;
};

inline void orthogonalize(const Bucket& bucket, const ParallelFor& parallel_for) {
  bucket.state->skipped = Orthogonalizer(bucket, parallel_for).run() ? 1 : 0;
}

}  // namespace powersgd::kernels::cpu::POWERSGD_TARGET
