// SPDX-License-Identifier: BSD-3-Clause
#include "kernels/cuda/block_tiles.h"

#include <algorithm>
#include <array>
#include <utility>

namespace powersgd::kernels::cuda {
namespace {

struct Range {
  int64_t begin = 0, end = 0;
};

Range strip_at(const Matrix& matrix, int64_t col) {
  return {col, std::min(col + kStrip, matrix.cols)};
}

constexpr int64_t kRawElements = 4096;      // of a raw segment per tile
constexpr int64_t kCheckedElements = 8192;  // of a row of Q per tile
constexpr int64_t kWidestProjectTile = 2048;

class Builder {
 public:
  Builder(const std::vector<Matrix>& matrices, const std::vector<RawSegment>& raw)
      : matrices_(matrices), raw_(raw) {
    for (const Matrix& matrix : matrices) {
      largest_rank_ = std::max(largest_rank_, matrix.rank);
      total_elements_ += matrix.rows * matrix.cols;
    }
    multiplies_ = multiplies(largest_rank_);
    next_counter_ = raw_flag_counter(static_cast<int64_t>(matrices.size())) + 1;
  }

  TileTable build() {
    add_raw(kProjectTiles);
    for (size_t i = 0; i < matrices_.size(); ++i) add_project(static_cast<int32_t>(i));
    end_stage();
    if (multiplies_) add_orthogonalize();
    end_stage();
    for (size_t i = 0; i < matrices_.size(); ++i) {
      if (multiplies_) add_back_project(static_cast<int32_t>(i));
      add_strips(static_cast<int32_t>(i));
    }
    end_stage();
    add_reconstruct();
    end_stage();
    return finish();
  }

 private:
  // The caller sets the parts of the new tile.
  Tile& add(int list, TileKind kind, int32_t item, Range rows, Range cols) {
    std::vector<Tile>& tiles = lists_[static_cast<size_t>(list)];
    tiles.push_back({kind, item, 0, 0, 1, 0, rows.begin, rows.end, cols.begin, cols.end});
    return tiles.back();
  }

  // Says which of `parts` partial results is the tile's. They begin at `slot`.
  static void set_part(Tile& tile, int64_t slot, int64_t part, int64_t parts, int64_t counter) {
    tile.slot = static_cast<int32_t>(slot);
    tile.part = static_cast<int32_t>(part);
    tile.parts = static_cast<int32_t>(parts);
    tile.counter = static_cast<int32_t>(counter);
  }

  // Elements per tile. A small bucket needs many blocks to fill the device evenly, a large one
  // needs blocks that are worth their start. So there are about `blocks` tiles, within limits.
  int64_t target_elements(int64_t blocks, int64_t smallest, int64_t largest) const {
    return std::clamp(total_elements_ / blocks, smallest, largest);
  }

  // The stages use the workspace one after the other.
  void end_stage() {
    workspace_slots_ = std::max(workspace_slots_, next_slot_);
    next_slot_ = 0;
  }

  int64_t take(int64_t count) { return std::exchange(next_slot_, next_slot_ + count); }

  void add_raw(int list) {
    for (size_t i = 0; i < raw_.size(); ++i) {
      for (int64_t begin = 0; begin < raw_[i].numel; begin += kRawElements)
        add(list, TileKind::kRawSegment, static_cast<int32_t>(i), {0, 1},
            {begin, std::min(begin + kRawElements, raw_[i].numel)});
    }
  }

  // Groups of as many rows as a block takes at a time, by column ranges. The partial P of a group's
  // ranges lie one after the other.
  void add_project(int32_t item) {
    const Matrix& matrix = matrices_[static_cast<size_t>(item)];
    const int64_t rows = kWarps * project_rows_per_warp(largest_rank_);
    // Partial results cost as many bytes more as ranges are narrower.
    const int64_t narrowest = std::clamp<int64_t>(32 * matrix.rank, 2 * kStrip, 4 * kStrip);
    const int64_t widest =
        std::min(target_elements(3072, rows * narrowest, INT64_MAX) / rows, kWidestProjectTile);
    const int64_t ranges = std::max<int64_t>(1, ceil_div(matrix.cols, round_up(widest, kStrip)));
    const int64_t width =
        std::max<int64_t>(kStrip, round_up(ceil_div(matrix.cols, ranges), kStrip));
    for (int64_t row = 0; row < matrix.rows; row += rows) {
      const Range group{row, std::min(row + rows, matrix.rows)};
      const int64_t parts = multiplies_ ? std::max<int64_t>(1, ceil_div(matrix.cols, width)) : 1;
      const int64_t partial =
          slots((group.end - group.begin) * matrix.rank * int64_t{sizeof(float)});
      const int64_t slot = parts > 1 ? take(parts * partial) : 0;
      const int64_t counter = parts > 1 ? next_counter_++ : 0;
      for (int64_t begin = 0, part = 0; part == 0 || begin < matrix.cols; begin += width, ++part) {
        Tile& tile = add(kProjectTiles, TileKind::kMatrix, item, group,
                         {begin, std::min(begin + width, matrix.cols)});
        if (multiplies_) set_part(tile, slot, part, parts, counter);
      }
    }
  }

  // A matrix has its tiles' Gram matrices.
  void add_orthogonalize() {
    for (size_t i = 0; i < matrices_.size(); ++i) {
      const Matrix& matrix = matrices_[i];
      const int64_t rows = orthogonalize_rows(matrix.rows);
      const int64_t parts = matrix.rank > 0 ? ceil_div(matrix.rows, rows) : 0;
      const int64_t slot = take(2 * parts * gram_slots(matrix.rank));
      for (int64_t part = 0; part < parts; ++part)
        set_part(add(kOrthogonalizeTiles, TileKind::kMatrix, static_cast<int32_t>(i),
                     {part * rows, std::min(part * rows + rows, matrix.rows)}, {0, matrix.rank}),
                 slot, part, parts, passes_counter(static_cast<int64_t>(i)));
    }
  }

  // Strips by row ranges. The partial q of a strip's ranges lie one after the other.
  void add_back_project(int32_t item) {
    const Matrix& matrix = matrices_[static_cast<size_t>(item)];
    const int64_t target = target_elements(2048, 16384, 65536) / kStrip;
    const int64_t wanted = std::max(target, 32 * matrix.rank);
    // Ranges are long, so that reading their sums costs little, but there are several hundred
    // tiles.
    const int64_t longest = round_up(target_elements(512, 16384, 1 << 20) / kStrip, 32);
    // One block adds a strip's ranges, so there are at most 128.
    const int64_t rows =
        round_up(std::max(std::min(wanted, longest), ceil_div(matrix.rows, 128)), 32);
    // A matrix without rows has one range, whose tiles write zeros to its q.
    const int64_t parts = std::max<int64_t>(1, ceil_div(matrix.rows, rows));
    const int64_t partial = slots(matrix.rank * kStrip * int64_t{sizeof(float)});
    const int64_t strips = ceil_div(matrix.cols, kStrip);
    const int64_t slot = parts > 1 ? take(strips * parts * partial) : 0;
    const int64_t counter = parts > 1 ? std::exchange(next_counter_, next_counter_ + strips) : 0;
    for (int64_t part = 0; part < parts; ++part) {
      for (int64_t strip = 0; strip < strips; ++strip)
        set_part(add(kBackProjectTiles, TileKind::kMatrix, item,
                     {part * rows, std::min(part * rows + rows, matrix.rows)},
                     strip_at(matrix, strip * kStrip)),
                 slot + strip * parts * partial, part, parts, counter + strip);
    }
  }

  void add_strips(int32_t item) {
    const Matrix& matrix = matrices_[static_cast<size_t>(item)];
    for (int64_t col = 0; col < matrix.cols; col += kStrip)
      add(kStrips, TileKind::kMatrix, item, {0, matrix.rank}, strip_at(matrix, col));
  }

  // The sums of squares of a row's parts lie one after the other, rows by parts, as doubles.
  void add_q_checks(int32_t item) {
    const Matrix& matrix = matrices_[static_cast<size_t>(item)];
    const int64_t parts = ceil_div(matrix.cols, kCheckedElements);
    const int64_t slot = take(slots(matrix.rank * parts * int64_t{sizeof(double)}));
    for (int64_t k = 0; k < matrix.rank; ++k) {
      for (int64_t part = 0; part < parts; ++part)
        set_part(
            add(kQCheckTiles, TileKind::kFactorRow, item, {k, k + 1},
                {part * kCheckedElements, std::min((part + 1) * kCheckedElements, matrix.cols)}),
            slot, part, parts, 0);
    }
  }

  // The first tile of a strip also writes its columns of q_warm, and needs the sums of squares.
  // With Q in shared memory a tile begins with much to copy.
  void add_reconstruct() {
    for (size_t i = 0; i < matrices_.size(); ++i) add_q_checks(static_cast<int32_t>(i));
    add_raw(kReconstructTiles);
    const bool low_rank = largest_rank_ <= kMostRanksInRegisters;
    const int64_t rows = round_up(target_elements(low_rank ? 4096 : 2048, 8192, 32768) / kStrip,
                                  low_rank ? 32 : kRowsOfBlock);
    int64_t check = 0;
    for (size_t i = 0; i < matrices_.size(); ++i) {
      const Matrix& matrix = matrices_[i];
      const std::vector<Tile>& checks = lists_[kQCheckTiles];
      const Tile* first =
          matrix.rank * matrix.cols > 0 ? &checks[static_cast<size_t>(check)] : nullptr;
      check += matrix.rank * ceil_div(matrix.cols, kCheckedElements);
      for (int64_t row = 0; row < std::max<int64_t>(matrix.rows, 1); row += rows) {
        for (int64_t col = 0; col < matrix.cols; col += kStrip) {
          Tile& tile = add(kReconstructTiles, TileKind::kMatrix, static_cast<int32_t>(i),
                           {row, std::min(row + rows, matrix.rows)}, strip_at(matrix, col));
          if (first != nullptr) set_part(tile, first->slot, 0, first->parts, 0);
        }
      }
    }
  }

  TileTable finish() {
    TileTable table;
    for (size_t list = 0; list < lists_.size(); ++list) {
      table.tiles.insert(table.tiles.end(), lists_[list].begin(), lists_[list].end());
      table.list_begin[list + 1] = static_cast<int64_t>(table.tiles.size());
    }
    table.largest_rank = largest_rank_;
    table.workspace_bytes = static_cast<size_t>(workspace_slots_ * kSlotBytes);
    table.num_counters = next_counter_;
    return table;
  }

  const std::vector<Matrix>& matrices_;
  const std::vector<RawSegment>& raw_;
  int64_t largest_rank_ = 0;
  bool multiplies_;
  int64_t total_elements_ = 0;
  std::array<std::vector<Tile>, kTileLists> lists_;
  int64_t next_counter_ = 0;
  int64_t next_slot_ = 0;
  int64_t workspace_slots_ = 0;
};

}  // namespace

TileTable make_tiles(const std::vector<Matrix>& matrices, const std::vector<RawSegment>& raw) {
  return Builder(matrices, raw).build();
}

}  // namespace powersgd::kernels::cuda
