// SPDX-License-Identifier: BSD-3-Clause
#include "kernels/cuda/tiles.h"

#include <algorithm>
#include <array>

namespace powersgd::kernels::cuda {
namespace {

// Elements per tile. A small bucket needs many blocks to fill the device evenly, a large one needs
// blocks that are worth their start. So there are about `blocks` tiles, within limits.
int64_t target_elements(const std::vector<Matrix>& matrices, int64_t blocks, int64_t smallest,
                        int64_t largest) {
  int64_t total = 0;
  for (const Matrix& matrix : matrices) total += matrix.rows * matrix.cols;
  return std::clamp(total / blocks, smallest, largest);
}

struct Range {
  int64_t begin = 0, end = 0;
};

Range strip_at(const Matrix& matrix, int64_t col) {
  return {col, std::min(col + kStrip, matrix.cols)};
}

constexpr int64_t kRawElements = 4096;  // per tile

class Builder {
 public:
  Builder(const std::vector<Matrix>& matrices, const std::vector<RawSegment>& raw,
          int64_t factor_bytes)
      : matrices_(matrices), raw_(raw), factor_bytes_(factor_bytes) {}

  TileTable build() {
    lists_ = {};
    add_raw(kProjectTiles);
    for (size_t i = 0; i < matrices_.size(); ++i) add_project(static_cast<int32_t>(i));
    place_project_partials();
    add_orthogonalize();
    end_stage();
    for (size_t i = 0; i < matrices_.size(); ++i) add_back_project(static_cast<int32_t>(i));
    end_stage();
    add_reconstruct();
    return finish();
  }

 private:
  // The caller sets the parts of the new tile.
  Tile& add(int list, TileKind kind, int32_t item, int64_t slot, Range rows, Range cols) {
    std::vector<Tile>& tiles = lists_[static_cast<size_t>(list)];
    tiles.push_back(
        {kind, item, static_cast<int32_t>(slot), 0, 0, rows.begin, rows.end, cols.begin, cols.end});
    return tiles.back();
  }

  // The tile that writes whether the matrix is active. Its parts are project's tiles from `first`
  // on.
  void add_activity(int32_t item, int64_t first) {
    if (matrices_[static_cast<size_t>(item)].active_offset < 0) return;
    Tile& tile = add(kProjectSums, TileKind::kActivity, item, 0, {}, {});
    tile.first_part = static_cast<int32_t>(first);
    tile.parts = static_cast<int32_t>(count(kProjectTiles) - first);
  }

  int64_t count(int list) const {
    return static_cast<int64_t>(lists_[static_cast<size_t>(list)].size());
  }

  // The stages use the workspace one after the other.
  void end_stage() {
    workspace_slots_ = std::max(workspace_slots_, next_slot_);
    next_slot_ = 0;
  }

  int64_t take(int64_t count) {
    const int64_t slot = next_slot_;
    next_slot_ += count;
    return slot;
  }

  void add_raw(int list) {
    for (size_t i = 0; i < raw_.size(); ++i) {
      for (int64_t begin = 0; begin < raw_[i].numel; begin += kRawElements)
        add(list, TileKind::kRawSegment, static_cast<int32_t>(i), 0, {0, 1},
            {begin, std::min(begin + kRawElements, raw_[i].numel)});
    }
  }

  void add_project(int32_t item) {
    const Matrix& matrix = matrices_[static_cast<size_t>(item)];
    const int64_t width = std::min(matrix.cols, kSplitColumns);
    const int64_t pass = kWarps / warps_per_group(width) * kRowsPerWarp;
    const int64_t elements = target_elements(matrices_, 4096, 4096, 32768);
    const int64_t first_tile = count(kProjectTiles);
    const int64_t rows =
        round_up(std::max<int64_t>(1, elements / std::max<int64_t>(width, 1)), pass);
    for (int64_t row = 0; row < matrix.rows; row += rows) {
      const Range range{row, std::min(row + rows, matrix.rows)};
      for (int64_t col = 0; col < matrix.cols; col += kSplitColumns)
        add(kProjectTiles, TileKind::kMatrix, item, 0, range,
            {col, std::min(col + kSplitColumns, matrix.cols)});
      if (matrix.cols > kSplitColumns)
        add(kProjectSums, TileKind::kSum, item, 0, range, {0, matrix.cols}).parts =
            static_cast<int32_t>(ceil_div(matrix.cols, kSplitColumns));
    }
    add_activity(item, first_tile);
  }

  // The partial P of a split matrix's column range c is at slot + c * slots(rows * rank). One word
  // of flags per project tile lies before them.
  void place_project_partials() {
    take(slots(count(kProjectTiles) * int64_t{sizeof(int32_t)}));
    std::vector<int64_t> base(matrices_.size(), 0);
    for (size_t i = 0; i < matrices_.size(); ++i) {
      const Matrix& matrix = matrices_[i];
      if (matrix.cols <= kSplitColumns) continue;
      const int64_t ranges = ceil_div(matrix.cols, kSplitColumns);
      base[i] = take(ranges * slots(matrix.rows * matrix.rank * factor_bytes_));
    }
    for (const int list : {kProjectTiles, kProjectSums}) {
      for (Tile& tile : lists_[static_cast<size_t>(list)]) {
        if (tile.kind != TileKind::kRawSegment)
          tile.slot = static_cast<int32_t>(base[static_cast<size_t>(tile.item)]);
      }
    }
    end_stage();
  }

  // A flag per tile comes first. Each matrix then has the arrays of the plain way, and its tiles'
  // Gram matrices.
  void add_orthogonalize() {
    int64_t tiles = 0;
    for (const Matrix& matrix : matrices_)
      tiles += ceil_div(matrix.rows, orthogonalize_rows(matrix.rows, matrix.rank));
    take(slots(tiles * int64_t{sizeof(int32_t)}));
    for (size_t i = 0; i < matrices_.size(); ++i) {
      const Matrix& matrix = matrices_[i];
      const int64_t rows = orthogonalize_rows(matrix.rows, matrix.rank);
      const int64_t partial = matrix.rank > kMaxFastRank ? 0 : gram_slots(matrix.rank);
      take(plain_slots(matrix.rank));
      for (int64_t row = 0; row < matrix.rows; row += rows)
        add(kOrthogonalizeTiles, TileKind::kMatrix, static_cast<int32_t>(i), take(partial),
            {row, std::min(row + rows, matrix.rows)}, {0, matrix.rank});
    }
  }

  void add_back_project(int32_t item) {
    const Matrix& matrix = matrices_[static_cast<size_t>(item)];
    const int64_t target = target_elements(matrices_, 2048, 16384, 65536) / kStrip;
    const int64_t wanted = std::max(target, 32 * std::min(matrix.rank, kMaxFastRank));
    add_strips(kBackProjectTiles, kBackProjectSums, item, wanted);
    for (int64_t col = 0; col < matrix.cols; col += kStrip)
      add(kStrips, TileKind::kMatrix, item, 0, {0, matrix.rank}, strip_at(matrix, col));
  }

  // Strips by row ranges of about `wanted` rows. The partial q of strip s and row range g is at
  // slot(s) + g * slots(rank * kStrip).
  void add_strips(int tiles, int sums, int32_t item, int64_t wanted) {
    const Matrix& matrix = matrices_[static_cast<size_t>(item)];
    // Ranges are long, so that reading their sums costs little, but there are several hundred
    // tiles.
    const int64_t longest = round_up(target_elements(matrices_, 512, 16384, 1 << 20) / kStrip, 32);
    // One thread adds a column's ranges, so there are at most 128.
    const int64_t rows =
        round_up(std::max(std::min(wanted, longest), ceil_div(matrix.rows, 128)), 32);
    // A matrix without rows has one range, whose tiles write zeros to its q.
    const int64_t ranges = std::max<int64_t>(1, ceil_div(matrix.rows, rows));
    const int64_t strips = ceil_div(matrix.cols, kStrip);
    const int64_t partial = slots(matrix.rank * kStrip * factor_bytes_);
    const int64_t base = ranges > 1 ? take(ranges * strips * partial) : 0;
    for (int64_t range = 0; range < ranges; ++range) {
      for (int64_t strip = 0; strip < strips; ++strip)
        add(tiles, TileKind::kMatrix, item, base + (strip * ranges + range) * partial,
            {range * rows, std::min(range * rows + rows, matrix.rows)},
            strip_at(matrix, strip * kStrip));
    }
    for (int64_t strip = 0; ranges > 1 && strip < strips; ++strip)
      add(sums, TileKind::kSum, item, base + strip * ranges * partial, {0, matrix.rows},
          strip_at(matrix, strip * kStrip))
          .parts = static_cast<int32_t>(ranges);
  }

  void add_reconstruct() {
    // The rows of Q come first, because they take longest to start and move the least.
    for (size_t i = 0; i < matrices_.size(); ++i) {
      for (int64_t k = 0; k < matrices_[i].rank; ++k)
        add(kReconstructTiles, TileKind::kFactorRow, static_cast<int32_t>(i), 0, {k, k + 1},
            {0, matrices_[i].cols});
    }
    add_raw(kReconstructTiles);
    const int64_t rows = round_up(target_elements(matrices_, 4096, 8192, 32768) / kStrip, 32);
    for (size_t i = 0; i < matrices_.size(); ++i) {
      for (int64_t row = 0; row < matrices_[i].rows; row += rows) {
        for (int64_t col = 0; col < matrices_[i].cols; col += kStrip)
          add(kReconstructTiles, TileKind::kMatrix, static_cast<int32_t>(i), 0,
              {row, std::min(row + rows, matrices_[i].rows)}, strip_at(matrices_[i], col));
      }
    }
  }

  TileTable finish() {
    TileTable table;
    for (size_t list = 0; list < lists_.size(); ++list) {
      table.tiles.insert(table.tiles.end(), lists_[list].begin(), lists_[list].end());
      table.list_begin[list + 1] = static_cast<int64_t>(table.tiles.size());
    }
    for (const Matrix& matrix : matrices_)
      table.largest_rank = std::max(table.largest_rank, matrix.rank);
    table.workspace_bytes = static_cast<size_t>(workspace_slots_ * kSlotBytes);
    return table;
  }

  const std::vector<Matrix>& matrices_;
  const std::vector<RawSegment>& raw_;
  const int64_t factor_bytes_;
  std::array<std::vector<Tile>, kTileLists> lists_;
  int64_t next_slot_ = 0;
  int64_t workspace_slots_ = 0;
};

}  // namespace

TileTable make_tiles(const std::vector<Matrix>& matrices, const std::vector<RawSegment>& raw,
                     DType factor_dtype, DType /*wire_dtype*/) {
  return Builder(matrices, raw, factor_dtype == DType::kFloat64 ? 8 : 4).build();
}

}  // namespace powersgd::kernels::cuda
