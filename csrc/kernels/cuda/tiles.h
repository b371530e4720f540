// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/shared/layout.h"
#include "powersgd/kernels.h"

// How a bucket is cut into tiles, one per thread block: what make_tiles and the kernels must agree
// on. Everything here depends on the shapes alone, and so does every order of summation.

namespace powersgd::kernels::cuda {

constexpr int kThreads = 256;  // of every block
constexpr int kWarpSize = 32;
constexpr int kWarps = kThreads / kWarpSize;

constexpr int kStrip = 128;               // columns that a warp takes at a time, 4 per lane
constexpr int kRowsPerWarp = 4;           // rows of M that a warp forms at a time
constexpr int64_t kSplitColumns = 16384;  // wider matrices are projected in column ranges of this
constexpr int64_t kMaxFastRank = 32;      // above, plain loops

// The lists of a TileTable.
enum TileList : int {
  kProjectTiles = 0,  // row and column ranges of matrices; raw segments (item < 0)
  // Row ranges of the matrices that are projected in column ranges; and, with no columns, each
  // matrix that tells whether it is active, with the range of its project tiles as the rows.
  kProjectSums,
  kOrthogonalizeTiles,  // row ranges
  kBackProjectTiles,    // strips of kStrip columns by row segments
  kBackProjectSums,     // strips of the matrices that have more than one row segment
  kStrips,              // strips of all matrices
  kReconstructTiles,  // rows of Q (slot 1); strips by row ranges (slot 0); raw segments (item < 0)
  kProjectTransposedTiles,  // raw segments (item < 0); strips by row segments
  // Strips of the matrices that have more than one row segment; and, with no columns, each matrix
  // that tells whether it is active, with the range of its tiles above as the rows.
  kProjectTransposedSums,
  // The launchers cannot read the matrices, which are in device memory: this list's length tells
  // them rank_class() of the largest rank. Its tiles are empty.
  kRankClass,
};
static_assert(kRankClass < kTileLists, "the interface has room for all lists");

constexpr int32_t raw_item(int64_t segment) { return static_cast<int32_t>(-1 - segment); }
POWERSGD_HOST_DEVICE inline int64_t segment_of(int32_t item) { return -1 - int64_t{item}; }

// 0..5 for ranks up to 1, 2, 4, 8, 16, 32; 6 for any rank.
inline int rank_class(int64_t rank) {
  int log2 = 0;
  while (log2 < 6 && (int64_t{1} << log2) < rank) ++log2;
  return log2;
}

// Project: how many warps share a row group: fewer rows at a time make finer tiles, as long as each
// warp has a strip to itself.
POWERSGD_HOST_DEVICE inline int warps_per_group(int64_t cols) {
  return cols >= 8 * kStrip ? 8 : cols >= 4 * kStrip ? 4 : cols >= 2 * kStrip ? 2 : 1;
}

// Orthogonalize: the rows of a tile. A matrix of high rank is one tile, since it takes the plain
// way.
POWERSGD_HOST_DEVICE inline int64_t orthogonalize_rows(int64_t rows, int64_t rank) {
  return rank > kMaxFastRank ? (rows > 0 ? rows : 1) : 1024;
}

POWERSGD_HOST_DEVICE inline int64_t triangle(int64_t rank) { return rank * (rank + 1) / 2; }

// Orthogonalize: the lower triangle of a tile's Gram matrix. The plain way's arrays, which lie
// before the first tile's slot: Gram matrix, inverse, four numbers per column.
POWERSGD_HOST_DEVICE inline int64_t gram_slots(int64_t rank) {
  return slots(triangle(rank) * int64_t{sizeof(double)});
}
POWERSGD_HOST_DEVICE inline int64_t plain_slots(int64_t rank) {
  return slots((2 * rank * rank + 4 * rank) * int64_t{sizeof(double)});
}

}  // namespace powersgd::kernels::cuda
