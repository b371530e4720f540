// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/shared/layout.h"
#include "powersgd/kernels.h"

// How the CPU stages cut a bucket into units of work, and where each keeps its partial results. All
// of it follows from the shapes: results do not depend on how many threads share the tiles.
namespace powersgd::kernels::cpu {

enum TileList : size_t {
  kMatrixTiles,       // row range x all columns: project and reconstruct
  kRawTiles,          // element range of a raw segment; between the two that it is handled with
  kBackProjectTiles,  // row range x column strip: a partial q
  kStripTiles,        // column strip: the sum of its partial q
  kGramTiles,         // row range of P: orthogonalize
  kFactorTiles,       // one per matrix: orthogonalize
  kFactorRowTiles,    // one row of q
};

// The micro-kernels of blocks.h handle this many rows at a time.
constexpr int kRows = 4;
// Blocks are padded with zeros to this many columns: a multiple of the lanes of every vector.
constexpr int64_t kPad = 16;
// Columns handled at a time (bands.h).
constexpr int64_t kBlockCols = 256;
// Between the rows of a block in the L1 cache: a constant, for the compiler's sake, and not a power
// of two, for rows so far apart would fall into the same cache sets.
constexpr int64_t kBlockStride = kBlockCols + kPad;
// At most so many rows of a factor are packed at a time; a higher rank is handled in parts.
constexpr int64_t kPackedRank = 32;

constexpr int64_t kStripCols = 8192;
// Elements of a band: with those of the next, on their way, they fit into the L2 cache.
constexpr int64_t kBandElements = int64_t{1} << 13;
constexpr int64_t kMaxBandRows = 64;
constexpr int64_t kGramRows = 512;

// Columns of a strip: all of them, or equal shares of a very wide matrix.
inline int64_t strip_cols(const Matrix& matrix) {
  const int64_t strips = std::max<int64_t>(ceil_div(matrix.cols, kStripCols), 1);
  return std::max(round_up(ceil_div(matrix.cols, strips), kBlockCols), kBlockCols);
}

// Rows of a band: about as many as asked for, more at a high rank, so that packing the factors does
// not count.
inline int64_t band_rows(const Matrix& matrix, int64_t rows) {
  return round_up(std::clamp<int64_t>(std::max(rows, 2 * matrix.rank), 1, kMaxBandRows), kRows);
}

// Rows of a partial q. The partial sums of a matrix are at most 1/32 of its size.
inline int64_t back_project_rows(const Matrix& matrix) {
  const int64_t rows = std::max({int64_t{64}, 32 * matrix.rank, ceil_div(matrix.rows, 64)});
  return round_up(rows, kRows);
}

// Elements of a partial q: blocks of kBlockCols columns, [rank, kBlockCols] each. Rows of the whole
// width would fall into the same cache sets where it is a power of two.
inline int64_t partial_q_numel(const Matrix& matrix) {
  return matrix.rank * round_up(matrix.cols, kBlockCols);
}

// Rows of a partial Gram matrix.
inline int64_t gram_rows(const Matrix& matrix) {
  return round_up(std::max({kGramRows, 2 * matrix.rank, ceil_div(matrix.rows, 64)}), kRows);
}

// The workspace of orthogonalize for one matrix, in doubles unless said otherwise.
struct OrthogonalizeLayout {
  explicit OrthogonalizeLayout(const Matrix& matrix)
      : stride(round_up(matrix.rank, kPad)),
        square(matrix.rank * stride),
        parts(ceil_div(matrix.rows, gram_rows(matrix))) {}

  int64_t stride;  // of the rows of a rank x rank matrix
  int64_t square;  // elements of one
  int64_t parts;   // partial Gram matrices

  // [ transform | gram | diagonal | order and dead flags (int32) | state (64 bytes) | partial ... ]
  int64_t gram() const { return square; }
  int64_t diagonal() const { return 2 * square; }
  int64_t order() const { return diagonal() + stride; }
  int64_t state() const { return order() + stride; }
  int64_t partial(int64_t part) const { return state() + 8 + part * square; }
  int64_t bytes() const { return partial(parts) * static_cast<int64_t>(sizeof(double)); }
};

// The flags of a tile of the lists up to kBackProjectTiles.
inline int32_t& flags_of(const Bucket& bucket, const Tile& tile) {
  return static_cast<int32_t*>(bucket.workspace)[&tile - bucket.tiles];
}

// body(tile) for each tile of the lists [first, last].
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

// on_matrix(tile) for each tile of a list next to kRawTiles, on_raw(tile) for each range of a raw
// segment, as one list.
template <class OnMatrix, class OnRaw>
void for_each_matrix_and_raw_tile(const Bucket& bucket, size_t matrix_list,
                                  const ParallelFor& parallel_for, const OnMatrix& on_matrix,
                                  const OnRaw& on_raw) {
  for_each_tile(bucket, std::min<size_t>(matrix_list, kRawTiles),
                std::max<size_t>(matrix_list, kRawTiles), parallel_for, [&](const Tile& tile) {
                  if (tile.kind == TileKind::kRawSegment) {
                    on_raw(tile);
                  } else {
                    on_matrix(tile);
                  }
                });
}

}  // namespace powersgd::kernels::cpu
