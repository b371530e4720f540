// SPDX-License-Identifier: BSD-3-Clause
#include "kernels/cpu/blocking/tiles.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <utility>
#include <vector>

namespace powersgd::kernels::cpu {
namespace {

Matrix make_matrix(int64_t rows, int64_t cols, int64_t rank) {
  Matrix matrix{};
  matrix.rows = rows;
  matrix.cols = cols;
  matrix.rank = rank;
  return matrix;
}

// Shapes of one tile and of many, tall and wide.
const std::vector<Matrix> kMatrices = {make_matrix(1, 1, 1),        make_matrix(17, 33, 4),
                                       make_matrix(40'001, 5, 2),   make_matrix(7, 100'000, 3),
                                       make_matrix(3001, 2049, 32), make_matrix(513, 20'000, 40)};
const std::vector<RawSegment> kRaw = {{0, 1, 0}, {1, 0, 1}, {1, 200'000, 1}};

using Range = std::pair<int64_t, int64_t>;  // of bytes of the workspace, or of tiles

class Tiles : public testing::Test {
 protected:
  static Matrix matrix(size_t item) { return kMatrices[item]; }

  std::vector<Tile> list(size_t which) const {
    const auto begin = table_.tiles.begin();
    return {begin + table_.list_begin[which], begin + table_.list_begin[which + 1]};
  }

  // Every element of every item, which has rows(item) x cols(item), is in one tile of the list.
  template <class Rows, class Cols>
  void expect_partition(size_t which, size_t items, const Rows& rows, const Cols& cols) const {
    const std::vector<Tile> tiles = list(which);
    std::vector<int64_t> covered(items, 0);
    for (const Tile& tile : tiles) {
      const auto item = static_cast<size_t>(tile.item);
      ASSERT_LT(item, items);
      ASSERT_TRUE(0 <= tile.row_begin && tile.row_begin < tile.row_end &&
                  tile.row_end <= rows(item));
      ASSERT_TRUE(0 <= tile.col_begin && tile.col_begin < tile.col_end &&
                  tile.col_end <= cols(item));
      covered[item] += (tile.row_end - tile.row_begin) * (tile.col_end - tile.col_begin);
    }
    for (size_t i = 0; i < items; ++i) EXPECT_EQ(covered[i], rows(i) * cols(i)) << "item " << i;
    for (size_t i = 0; i < tiles.size(); ++i) {
      for (size_t k = 0; k < i; ++k) EXPECT_FALSE(overlap(tiles[i], tiles[k])) << k << ", " << i;
    }
  }

  static bool overlap(const Tile& a, const Tile& b) {
    return a.item == b.item && a.row_begin < b.row_end && b.row_begin < a.row_end &&
           a.col_begin < b.col_end && b.col_begin < a.col_end;
  }

  // The bytes of the workspace that each matrix uses lie apart, and in the workspace.
  template <class Bytes>
  void expect_room(size_t which, const Bytes& bytes, std::vector<Range> taken = {}) const {
    std::set<int32_t> seen;
    for (const Tile& tile : list(which)) {
      if (!seen.insert(tile.item).second) continue;
      const int64_t begin = tile.slot * kSlotBytes;
      const Range own{begin, begin + bytes(matrix(static_cast<size_t>(tile.item)))};
      EXPECT_LE(own.second, static_cast<int64_t>(table_.workspace_bytes));
      for (const Range& other : taken) {
        EXPECT_TRUE(own.second <= other.first || other.second <= own.first) << "item " << tile.item;
      }
      taken.push_back(own);
    }
  }

  const TileTable table_ = make_tiles(kMatrices, kRaw);
};

TEST_F(Tiles, EveryElementIsInOneTileOfAList) {
  const auto rows = [](size_t item) { return matrix(item).rows; };
  const auto cols = [](size_t item) { return matrix(item).cols; };
  const auto rank = [](size_t item) { return matrix(item).rank; };
  expect_partition(kMatrixTiles, kMatrices.size(), rows, cols);
  expect_partition(kBackProjectTiles, kMatrices.size(), rows, cols);
  expect_partition(kStripTiles, kMatrices.size(), rows, cols);
  expect_partition(kGramTiles, kMatrices.size(), rows, rank);
  expect_partition(kFactorTiles, kMatrices.size(), rows, rank);
  expect_partition(kFactorRowTiles, kMatrices.size(), rank, cols);
  expect_partition(
      kRawTiles, kRaw.size(), [](size_t) { return int64_t{1}; },
      [](size_t item) { return kRaw[item].numel; });
}

TEST_F(Tiles, PartialResultsLieApart) {
  const int64_t flags =
      table_.list_begin[kBackProjectTiles + 1] * static_cast<int64_t>(sizeof(int32_t));
  const auto partial_q = [&](const Matrix& matrix) {
    const int64_t parts = ceil_div(matrix.rows, back_project_rows(matrix));
    return parts * partial_q_numel(matrix) * int64_t{sizeof(float)};
  };
  expect_room(kBackProjectTiles, partial_q, {{0, flags}});
  expect_room(kStripTiles, partial_q, {{0, flags}});
  const auto orthogonalize = [](const Matrix& matrix) {
    return OrthogonalizeLayout(matrix).bytes();
  };
  expect_room(kGramTiles, orthogonalize);
  expect_room(kFactorTiles, orthogonalize);
}

// A strip sums the partial q that the tiles of back_project have put into the slot of its matrix.
TEST_F(Tiles, AStripHasTheSlotOfItsMatrixsPartialQ) {
  for (const Tile& strip : list(kStripTiles)) {
    for (const Tile& tile : list(kBackProjectTiles)) {
      EXPECT_EQ(tile.item == strip.item, tile.slot == strip.slot);
    }
  }
}

TEST_F(Tiles, EveryRowOfQHasASlot) {
  const std::vector<Tile> rows = list(kFactorRowTiles);
  std::set<int32_t> slots;
  for (const Tile& row : rows) slots.insert(row.slot);
  EXPECT_EQ(slots.size(), rows.size());
  EXPECT_LE((*slots.rbegin() + 1) * kSlotBytes, static_cast<int64_t>(table_.workspace_bytes));
}

}  // namespace
}  // namespace powersgd::kernels::cpu
