// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/shared/layout.h"
#include "powersgd/kernels/kernels.h"

// How the CPU stages cut a bucket into units of work, and where each keeps its partial results. All
// of it follows from the shapes: results do not depend on how many threads share the tiles.
//
//   raw segment   a range of the gradient that travels uncompressed
//   tile          the unit of work of one thread: rows and columns of a matrix, or elements of a
//                 raw segment
//   strip         a range of at most about kStripCols columns of a matrix
//   band          a few rows of a strip, which fit into the L2 cache with the next band
//   block         kBlockCols columns of a band; its share of the factors stays in the L1 cache
//   lane          one element of a SIMD vector
//   slot          kSlotBytes of the workspace, where a tile has its partial result
namespace powersgd::kernels::cpu {

enum TileList : size_t {
  kMatrixTiles,  // project and reconstruct: rows of a matrix, all columns
  kRawTiles,     // elements of a raw segment; it follows kMatrixTiles, with which it is shared out
  kBackProjectTiles,  // back_project: rows of a strip, with a partial q
  kStripTiles,        // back_project: the sum of the partial q of a strip
  kGramTiles,         // orthogonalize: rows of P
  kFactorTiles,       // orthogonalize: one per matrix
  kFactorRowTiles,    // random_start and reconstruct: one row of q
};

// The products (products.h) take this many rows at a time.
constexpr int kRows = 4;
// Blocks are padded with zeros to this many columns: a multiple of the lanes of every vector.
constexpr int64_t kPad = 16;
// Columns of a block.
constexpr int64_t kBlockCols = 256;
// Elements between the rows of a block in the L1 cache. It is a constant to help the compiler, and
// not a power of two because rows so far apart would fall into the same cache sets.
constexpr int64_t kBlockStride = kBlockCols + kPad;
// The most rows of a factor that are packed at a time; a higher rank is handled in parts.
constexpr int64_t kPackedRank = 32;

constexpr int64_t kStripCols = 8192;
// Elements of a band. They fit into the L2 cache together with the next band, which is being
// prefetched.
constexpr int64_t kBandElements = int64_t{1} << 13;
constexpr int64_t kMaxBandRows = 64;
constexpr int64_t kGramRows = 512;

// Returns the columns of a strip: all of them, or equal shares of a very wide matrix.
inline int64_t strip_cols(const Matrix& matrix) {
  const int64_t strips = std::max<int64_t>(ceil_div(matrix.cols, kStripCols), 1);
  return std::max(round_up(ceil_div(matrix.cols, strips), kBlockCols), kBlockCols);
}

// Returns the rows of a band: about `rows`, or more at a high rank, so that packing the factors
// costs little.
inline int64_t band_rows(const Matrix& matrix, int64_t rows) {
  return round_up(std::clamp<int64_t>(std::max(rows, 2 * matrix.rank), 1, kMaxBandRows), kRows);
}

// Returns the rows of a partial q. The partial sums of a matrix are at most 1/32 of its size.
inline int64_t back_project_rows(const Matrix& matrix) {
  const int64_t rows = std::max({int64_t{64}, 32 * matrix.rank, ceil_div(matrix.rows, 64)});
  return round_up(rows, kRows);
}

// Returns the elements of a partial q: blocks of kBlockCols columns, [rank, kBlockCols] each. Rows
// of the whole width would fall into the same cache sets if the width is a power of two.
inline int64_t partial_q_numel(const Matrix& matrix) {
  return matrix.rank * round_up(matrix.cols, kBlockCols);
}

// Returns the rows of a partial Gram matrix.
inline int64_t gram_rows(const Matrix& matrix) {
  return round_up(std::max({kGramRows, 2 * matrix.rank, ceil_div(matrix.rows, 64)}), kRows);
}

// The workspace of orthogonalize for one matrix. Sizes count doubles, except for bytes().
struct OrthogonalizeLayout {
  explicit OrthogonalizeLayout(const Matrix& matrix)
      : stride(round_up(matrix.rank, kPad)),
        square(matrix.rank * stride),
        parts(ceil_div(matrix.rows, gram_rows(matrix))) {}

  int64_t stride;  // of the rows of a rank x rank matrix
  int64_t square;  // elements of one
  int64_t parts;   // partial Gram matrices

  // [ transform | gram | diagonal | state (64 bytes) | partial ... ]
  int64_t gram() const { return square; }
  int64_t diagonal() const { return 2 * square; }
  int64_t state() const { return diagonal() + stride; }
  int64_t partial(int64_t part) const { return state() + 8 + part * square; }
  int64_t bytes() const { return partial(parts) * static_cast<int64_t>(sizeof(double)); }
};

// Returns the flag of a tile of kMatrixTiles or kRawTiles: 1 if project has found an element of the
// gradient that is not finite.
inline int32_t& non_finite_flag(const Bucket& bucket, const Tile& tile) {
  return static_cast<int32_t*>(bucket.workspace)[&tile - bucket.tiles];
}

// Calls body(tile) for each tile of the lists [first, last].
template <class Body>
void for_each_tile(const Bucket& bucket, size_t first, size_t last, const ParallelFor& parallel_for,
                   const Body& body) {
  const int64_t begin = bucket.tile_list_begin[first];
  const int64_t count = bucket.tile_list_begin[last + 1] - begin;
  if (count == 0) return;
  const Tile* tiles = bucket.tiles + begin;
  parallel_for(count, [tiles, &body](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i) body(tiles[i]);
  });
}

template <class Body>
void for_each_tile(const Bucket& bucket, size_t list, const ParallelFor& parallel_for,
                   const Body& body) {
  for_each_tile(bucket, list, list, parallel_for, body);
}

// Calls on_matrix(tile) for each tile of kMatrixTiles, and on_raw(tile) for each one of kRawTiles.
// Both lists are shared out as one.
template <class OnMatrix, class OnRaw>
void for_each_matrix_and_raw_tile(const Bucket& bucket, const ParallelFor& parallel_for,
                                  const OnMatrix& on_matrix, const OnRaw& on_raw) {
  for_each_tile(bucket, kMatrixTiles, kRawTiles, parallel_for, [&](const Tile& tile) {
    if (tile.kind == TileKind::kRawSegment) {
      on_raw(tile);
    } else {
      on_matrix(tile);
    }
  });
}

}  // namespace powersgd::kernels::cpu
