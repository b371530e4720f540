// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/shared/layout.h"
#include "kernels/shared/numerics.h"
#include "powersgd/kernels/kernels.h"

// The cut of a bucket into tiles, one per thread block, on which make_tiles and the kernels must
// agree. Everything here depends on the shapes alone, and so does every order of summation.

namespace powersgd::kernels::cuda {

constexpr int kThreads = 256;  // of every block
constexpr int kWarpSize = 32;
constexpr int kWarps = kThreads / kWarpSize;

constexpr int kStrip = 128;            // columns that a warp takes at a time, 4 per lane
constexpr int kMaxTilesToFactor = 64;  // of a matrix in orthogonalize

// The lists of a TileTable. Only those that say so hold another kind than kMatrix.
enum TileList : int {
  kProjectTiles = 0,    // row and column ranges; kRawSegment
  kOrthogonalizeTiles,  // row ranges
  kBackProjectTiles,    // strips of kStrip columns by row ranges
  kStrips,              // strips of all matrices
  kQCheckTiles,         // kFactorRow
  kReconstructTiles,    // kRawSegment; strips by row ranges
};
static_assert(kReconstructTiles < kTileLists, "the interface has room for all lists");

// Bucket::counters. After these come, for each matrix, the flag of its tiles in project, the count
// of its tiles in orthogonalize and the last pass that these have needed, then the flag of all raw
// segments, and then the counters that tiles name.
enum Counter : int {
  kProjectArrivals = 0,
  kOrthogonalizeTickets,
  kGramsWritten,
  kNonFiniteP,  // the launch that has found an element of P that is not finite, plus 1
  kReconstructTickets,
  kQChecked,
  kFirstOfMatrices,
};
POWERSGD_HOST_DEVICE inline int64_t flag_counter(int64_t matrix) {
  return kFirstOfMatrices + 3 * matrix;
}
POWERSGD_HOST_DEVICE inline int64_t passes_counter(int64_t matrix) {
  return flag_counter(matrix) + 1;
}
POWERSGD_HOST_DEVICE inline int64_t raw_flag_counter(int64_t num_matrices) {
  return flag_counter(num_matrices);
}

// The rows of M that a warp of project forms at a time. More would not fit into registers, fewer
// would read the factors more often.
POWERSGD_HOST_DEVICE constexpr int project_rows_per_warp(int64_t largest_rank) {
  return largest_rank <= 4 ? 8 : 4;
}

// reconstruct holds up to this many ranks of Q in registers. At higher ranks, Q is in shared
// memory, and a block takes kRowsOfBlock rows at a time.
constexpr int kMostRanksInRegisters = 8;
constexpr int kRowsOfBlock = 64;

// The rows of a tile of orthogonalize. Every block adds up the results of all tiles of its matrix,
// so their number is limited.
inline int64_t orthogonalize_rows(int64_t rows) {
  const int64_t even = round_up(ceil_div(rows, kMaxTilesToFactor), kWarpSize);
  return even > kThreads ? even : kThreads;
}

POWERSGD_HOST_DEVICE inline int64_t triangle(int64_t rank) { return rank * (rank + 1) / 2; }

// The workspace of orthogonalize: the lower triangle of a tile's Gram matrix, once for even and
// once for odd passes.
POWERSGD_HOST_DEVICE inline int64_t gram_slots(int64_t rank) {
  return slots(triangle(rank) * int64_t{sizeof(double)});
}

}  // namespace powersgd::kernels::cuda
