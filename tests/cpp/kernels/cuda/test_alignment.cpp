// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <vector>

#include "kernels/cuda/form_m.cuh"
#include "kernels/cuda/reconstruct_staging.cuh"
#include "simt/simt.h"

// What the kernels access in vectors where a parameter of odd size shifts the gradients behind it.

namespace powersgd::test {
namespace {

using namespace kernels;
using namespace kernels::cuda;

constexpr int64_t kRows = 4, kColumns = kStrip;
alignas(16) float array[kRows * kColumns + 4];

TEST(Alignment, OnlyTheGradientIsAccessedByElements) {
  for (int64_t shift = 0; shift < 4; ++shift) {
    Bucket bucket{};
    bucket.gradient = array;
    Work work{};
    work.tile.row_end = kRows;
    work.tile.col_end = kColumns;
    work.matrix.cols = kColumns;
    work.matrix.gradient_offset = shift;
    work.matrix.memory = work.matrix.q_local = work.matrix.q_warm = array;
    const auto rows = rows_of<kRows, float, float>(bucket, work, 0);
    EXPECT_EQ(rows.gradient_aligned, shift == 0);
    EXPECT_TRUE(rows.aligned);
    work.matrix.q_warm = array + 1;
    EXPECT_FALSE((rows_of<kRows, float, float>(bucket, work, 0).aligned));
  }
}

// Every column has one lane, and an access of a warp reaches neighboring elements.
TEST(Alignment, LanesTakeTurnsAtAnUnalignedGradient) {
  for (const int64_t width : {kColumns, int64_t{100}}) {
    for (int64_t shift = 0; shift < 4; ++shift) {
      Matrix matrix{};
      matrix.cols = kColumns;
      Tile tile{};
      tile.col_end = width;
      std::vector<int> lanes(kColumns, -1);
      simt::launch({1, kWarpSize, 0}, [&] {
        const StripColumns lane(array + shift, matrix, tile);
        const LaneColumns& columns = lane.columns;
        EXPECT_EQ(columns.aligned, shift == 0);
        for (int j = 0; j < 4; ++j) {
          if (j * columns.stride >= columns.count) continue;
          int& owner = lanes[static_cast<size_t>(lane.first + j * columns.stride)];
          EXPECT_EQ(owner, -1);
          owner = lane_id();
        }
      });
      for (int64_t col = 0; col < kColumns; ++col) {
        const int64_t owner = shift == 0 ? col / 4 : col % kWarpSize;
        EXPECT_EQ(lanes[static_cast<size_t>(col)], col < width ? owner : -1);
      }
    }
  }
}

}  // namespace
}  // namespace powersgd::test
