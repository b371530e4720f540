// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/shared/layout.h"
#include "powersgd/kernels.h"

// The cut of a bucket into tiles, one per thread block, on which make_tiles and the kernels must
// agree. Everything here depends on the shapes alone, and so does every order of summation.

namespace powersgd::kernels::cuda {

constexpr int kThreads = 256;  // of every block
constexpr int kWarpSize = 32;
constexpr int kWarps = kThreads / kWarpSize;

constexpr int kStrip = 128;               // columns that a warp takes at a time, 4 per lane
constexpr int kRowsPerWarp = 4;           // rows of M that a warp forms at a time
constexpr int64_t kSplitColumns = 16384;  // project takes wider matrices in ranges of so many
constexpr int64_t kMaxFastRank = 32;      // above, plain loops

// The lists of a TileTable. Only those that say so hold another kind than kMatrix.
enum TileList : int {
  kProjectTiles = 0,  // row and column ranges; kRawSegment
  kProjectSums,  // kSum: row ranges of the matrices that are projected in column ranges; kActivity
  kOrthogonalizeTiles,  // row ranges
  kBackProjectTiles,    // strips of kStrip columns by row ranges
  kBackProjectSums,     // kSum: strips of the matrices that have more than one row range
  kStrips,              // strips of all matrices
  kReconstructTiles,    // kFactorRow; kRawSegment; strips by row ranges
};
static_assert(kReconstructTiles < kTileLists, "the interface has room for all lists");

// The warps that share a group of rows in project. Fewer rows at a time make finer tiles, as long
// as each warp has a strip to itself.
POWERSGD_HOST_DEVICE inline int warps_per_group(int64_t cols) {
  return cols >= 8 * kStrip ? 8 : cols >= 4 * kStrip ? 4 : cols >= 2 * kStrip ? 2 : 1;
}

// The rows of a tile of orthogonalize. A matrix of high rank takes the plain way, and so is one
// tile.
POWERSGD_HOST_DEVICE inline int64_t orthogonalize_rows(int64_t rows, int64_t rank) {
  return rank > kMaxFastRank ? (rows > 0 ? rows : 1) : 1024;
}

POWERSGD_HOST_DEVICE inline int64_t triangle(int64_t rank) { return rank * (rank + 1) / 2; }

// The workspace of orthogonalize: the lower triangle of a tile's Gram matrix, and the arrays of the
// plain way, which lie before a matrix's first tile. Those are the Gram matrix, its inverse, and
// four numbers per column.
POWERSGD_HOST_DEVICE inline int64_t gram_slots(int64_t rank) {
  return slots(triangle(rank) * int64_t{sizeof(double)});
}
POWERSGD_HOST_DEVICE inline int64_t plain_slots(int64_t rank) {
  return slots((2 * rank * rank + 4 * rank) * int64_t{sizeof(double)});
}

}  // namespace powersgd::kernels::cuda
