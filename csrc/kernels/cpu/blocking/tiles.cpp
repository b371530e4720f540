// SPDX-License-Identifier: BSD-3-Clause
#include "kernels/cpu/blocking/tiles.h"

#include <utility>

namespace powersgd::kernels::cpu {
namespace {

// A tile has about this many elements, which take tens of microseconds. Threads then share the work
// evenly, and the cost per tile is small.
constexpr int64_t kTileElements = int64_t{1} << 18;
constexpr int64_t kRawTileElements = int64_t{1} << 16;
constexpr int64_t kMinTileRows = 16;

class TileBuilder {
 public:
  TileBuilder(const std::vector<Matrix>& matrices, const std::vector<RawSegment>& raw)
      : matrices_(matrices), raw_(raw) {}

  TileTable build() {
    begin_list(kMatrixTiles);
    for_each_matrix(&TileBuilder::add_matrix_tiles);
    begin_list(kRawTiles);
    for (size_t i = 0; i < raw_.size(); ++i) add_raw_tiles(static_cast<int32_t>(i));
    begin_list(kBackProjectTiles);
    for_each_matrix(&TileBuilder::add_back_project_tiles);
    place_partial_q();
    begin_list(kStripTiles);
    for_each_matrix(&TileBuilder::add_strip_tiles);
    end_stage();
    begin_list(kGramTiles);
    for_each_matrix(&TileBuilder::add_gram_tiles);
    end_stage();
    begin_list(kFactorTiles);
    for_each_matrix(&TileBuilder::add_factor_tiles);
    end_stage();
    begin_list(kFactorRowTiles);
    for_each_matrix(&TileBuilder::add_factor_row_tiles);
    end_stage();
    for (size_t list = kFactorRowTiles + 1; list <= kTileLists; ++list) begin_list(list);
    for (const Matrix& matrix : matrices_)
      table_.largest_rank = std::max(table_.largest_rank, matrix.rank);
    return std::move(table_);
  }

 private:
  void begin_list(size_t list) {
    table_.list_begin[list] = static_cast<int64_t>(table_.tiles.size());
  }

  // Each stage has the whole workspace to itself.
  void end_stage() {
    table_.workspace_bytes =
        std::max(table_.workspace_bytes, static_cast<size_t>(slots_ * kSlotBytes));
    slots_ = 0;
  }

  int32_t take_slots(int64_t bytes) {
    const int64_t slot = slots_;
    slots_ += slots(bytes);
    return static_cast<int32_t>(slot);
  }

  void for_each_matrix(void (TileBuilder::*add)(int32_t, const Matrix&)) {
    for (size_t i = 0; i < matrices_.size(); ++i) {
      (this->*add)(static_cast<int32_t>(i), matrices_[i]);
    }
  }

  void add(TileKind kind, int32_t item, int32_t slot, int64_t row_begin, int64_t row_end,
           int64_t col_begin, int64_t col_end) {
    table_.tiles.push_back({kind, item, slot, 0, 1, 0, row_begin, row_end, col_begin, col_end});
  }

  void add_matrix_tiles(int32_t item, const Matrix& matrix) {
    if (matrix.cols == 0) return;
    const int64_t rows = round_up(std::max(kMinTileRows, kTileElements / matrix.cols), kRows);
    for (int64_t row = 0; row < matrix.rows; row += rows) {
      add(TileKind::kMatrix, item, 0, row, std::min(row + rows, matrix.rows), 0, matrix.cols);
    }
  }

  void add_raw_tiles(int32_t item) {
    const int64_t numel = raw_[static_cast<size_t>(item)].numel;
    for (int64_t i = 0; i < numel; i += kRawTileElements) {
      add(TileKind::kRawSegment, item, 0, 0, 1, i, std::min(i + kRawTileElements, numel));
    }
  }

  void add_back_project_tiles(int32_t item, const Matrix& matrix) {
    const int64_t rows = back_project_rows(matrix);
    const int64_t strip = strip_cols(matrix);
    for (int64_t row = 0; row < matrix.rows; row += rows) {
      for (int64_t col = 0; col < matrix.cols; col += strip) {
        add(TileKind::kMatrix, item, 0, row, std::min(row + rows, matrix.rows), col,
            std::min(col + strip, matrix.cols));
      }
    }
  }

  // The slot of a matrix's back-project and strip tiles holds the partial q of all of its row
  // ranges, partial_q_numel elements each, behind the flags of the tiles so far.
  void place_partial_q() {
    take_slots(static_cast<int64_t>(table_.tiles.size() * sizeof(int32_t)));
    for (const Matrix& matrix : matrices_) {
      const int64_t parts = ceil_div(matrix.rows, back_project_rows(matrix));
      partial_q_slots_.push_back(
          take_slots(parts * partial_q_numel(matrix) * int64_t{sizeof(float)}));
    }
    for (size_t i = static_cast<size_t>(table_.list_begin[kBackProjectTiles]);
         i < table_.tiles.size(); ++i) {
      table_.tiles[i].slot = partial_q_slots_[static_cast<size_t>(table_.tiles[i].item)];
    }
  }

  void add_strip_tiles(int32_t item, const Matrix& matrix) {
    const int64_t strip = strip_cols(matrix);
    for (int64_t col = 0; col < matrix.cols; col += strip) {
      add(TileKind::kMatrix, item, partial_q_slots_[static_cast<size_t>(item)], 0, matrix.rows, col,
          std::min(col + strip, matrix.cols));
    }
  }

  void add_gram_tiles(int32_t item, const Matrix& matrix) {
    const int64_t rows = gram_rows(matrix);
    const int32_t slot = take_slots(OrthogonalizeLayout(matrix).bytes());
    for (int64_t row = 0; row < matrix.rows; row += rows) {
      add(TileKind::kMatrix, item, slot, row, std::min(row + rows, matrix.rows), 0, matrix.rank);
    }
  }

  void add_factor_tiles(int32_t item, const Matrix& matrix) {
    const int32_t slot = take_slots(OrthogonalizeLayout(matrix).bytes());
    add(TileKind::kMatrix, item, slot, 0, matrix.rows, 0, matrix.rank);
  }

  // The slot holds the squared norm of the row.
  void add_factor_row_tiles(int32_t item, const Matrix& matrix) {
    for (int64_t row = 0; row < matrix.rank; ++row) {
      add(TileKind::kFactorRow, item, take_slots(sizeof(double)), row, row + 1, 0, matrix.cols);
    }
  }

  const std::vector<Matrix>& matrices_;
  const std::vector<RawSegment>& raw_;
  int64_t slots_ = 0;
  std::vector<int32_t> partial_q_slots_;  // by matrix
  TileTable table_;
};

}  // namespace

TileTable make_tiles(const std::vector<Matrix>& matrices, const std::vector<RawSegment>& raw) {
  return TileBuilder(matrices, raw).build();
}

}  // namespace powersgd::kernels::cpu
