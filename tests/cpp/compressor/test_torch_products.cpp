// SPDX-License-Identifier: BSD-3-Clause
#include "compressor/torch_products.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "support/random.h"

namespace powersgd {
namespace {

using Shape = std::pair<int64_t, int64_t>;

class Orthonormal : public testing::TestWithParam<Shape> {
 protected:
  const int64_t rows_ = GetParam().first, rank_ = GetParam().second;

  at::Tensor random(int64_t columns) const {
    return test::random(static_cast<uint64_t>(columns), {rows_, columns});
  }

  // Checks that the basis is orthonormal, has `live` columns, and holds all of `p`.
  void expect_basis(const at::Tensor& p, int64_t live, double missed = 1e-6) const {
    const at::Tensor basis = orthonormal(p, 0);
    const at::Tensor gram = basis.t().matmul(basis);
    const at::Tensor norms = gram.diagonal().round();
    EXPECT_EQ(norms.sum().item<double>(), static_cast<double>(live));
    EXPECT_LT((gram - norms.diag()).abs().max().item<double>(), 1e-13);
    EXPECT_TRUE(at::equal(basis.index({at::Tensor(), norms.eq(0)}).abs().sum(),
                          at::zeros({}, at::kDouble)));  // dead columns are exactly 0
    const at::Tensor columns = p.to(at::kDouble);
    const at::Tensor left = columns - basis.matmul(basis.t().matmul(columns));
    EXPECT_LE(left.norm().item<double>(), missed * columns.norm().item<double>());
  }
};

INSTANTIATE_TEST_SUITE_P(Shapes, Orthonormal,
                         testing::Values(Shape{90, 33}, Shape{401, 48}, Shape{64, 64},
                                         Shape{700, 64}, Shape{1030, 128}, Shape{50, 64},
                                         Shape{1, 40}),
                         [](const auto& shape) {
                           return std::to_string(shape.param.first) + "x" +
                                  std::to_string(shape.param.second);
                         });

TEST_P(Orthonormal, RandomColumns) { expect_basis(random(rank_), std::min(rows_, rank_)); }

TEST_P(Orthonormal, ColumnsThatRepeatAreDead) {
  const at::Tensor half = random(rank_ / 2);
  expect_basis(at::cat({half, half, half}, 1).narrow(1, 0, rank_), std::min(rows_, rank_ / 2));
}

TEST_P(Orthonormal, ProductsOfLowRank) {
  const int64_t rank = std::min<int64_t>(5, rows_);
  const auto integers = [](int64_t rows, int64_t columns) {
    const at::Tensor normal = test::random(static_cast<uint64_t>(columns), {rows, columns});
    return normal.mul(3).round() + at::eye(rows, columns);
  };
  expect_basis(integers(rows_, rank).matmul(integers(rank, rank_)), rank);
}

TEST_P(Orthonormal, ZerosAndColumnsOfZeros) {
  expect_basis(at::zeros({rows_, rank_}), 0);
  at::Tensor p = random(rank_);
  p.select(1, 0).zero_();
  p.select(1, 3).zero_();
  expect_basis(p, std::min(rows_, rank_ - 2));
}

TEST_P(Orthonormal, ScaleDoesNotMatter) {
  for (const double scale : {1e-30, 1e30})
    expect_basis(random(rank_) * scale, std::min(rows_, rank_));
}

// Each column is mostly the first one.
TEST_P(Orthonormal, IllConditionedColumns) {
  if (rows_ < rank_) return;
  const at::Tensor scales = at::logspace(0, -4, rank_);
  expect_basis(random(1) + random(rank_) * scales, rank_, 1e-12);
}

TEST_P(Orthonormal, RowsOfZerosStayZeros) {
  at::Tensor p = random(rank_);
  p.narrow(0, rows_ / 2, (rows_ + 2) / 3).zero_();
  const at::Tensor basis = orthonormal(p, 0);
  EXPECT_EQ(basis.narrow(0, rows_ / 2, (rows_ + 2) / 3).abs().max().item<double>(), 0);
}

TEST(OrthonormalColumns, BelowEpsilonAreDead) {
  const at::Tensor basis = at::eye(60, 40);
  const at::Tensor p = basis * at::logspace(0, -3.9, 40);  // squares from 1 to 1e-7.8
  const at::Tensor live = orthonormal(p, 1e-4).square().sum(0);
  // The trace is 1 / (1 - 10^-0.2).
  const at::Tensor expected = p.square().sum(0).gt(1e-4 * p.square().sum()).to(at::kDouble);
  EXPECT_LT((live - expected).abs().max().item<double>(), 1e-10);
}

TEST(OrthonormalColumns, AreZeroWhereTheyAreNotFinite) {
  const at::Tensor p = at::full({50, 40}, std::numeric_limits<float>::quiet_NaN());
  EXPECT_EQ(orthonormal(p, 0).abs().max().item<double>(), 0);
}

}  // namespace
}  // namespace powersgd
