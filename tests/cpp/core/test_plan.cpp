// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <cmath>

#include "powersgd/core/plan.h"
#include "support/hook_defaults.h"

namespace powersgd {
namespace {

using Pair = std::pair<int64_t, int64_t>;

Pair shape_of(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides = {}) {
  const MatrixShape shape = matrix_shape({sizes, strides});
  return {shape.rows, shape.cols};
}

Options with_rank(int64_t rank, double rate = 2) {
  Options options = test::hook_defaults();
  options.matrix_approximation_rank = rank;
  options.min_compression_rate = rate;
  return options;
}

TEST(MatrixShape, OutputChannelsAreRows) {
  EXPECT_EQ(shape_of({64, 3, 7, 7}), Pair(64, 147));
  EXPECT_EQ(shape_of({1000, 512}), Pair(1000, 512));
}

TEST(MatrixShape, ChannelsLastKeepsItsRows) {
  EXPECT_EQ(shape_of({64, 3, 7, 7}, {147, 1, 21, 3}), Pair(64, 147));
  EXPECT_EQ(shape_of({64, 1, 3, 3}, {9, 1, 3, 1}), Pair(64, 9));
}

TEST(MatrixShape, TransposedWeightHasItsColumnsAsRows) {
  EXPECT_EQ(shape_of({10, 30}, {1, 10}), Pair(30, 10));
}

TEST(MatrixShape, VectorsAndScalarsAreOneRow) {
  EXPECT_EQ(shape_of({}), Pair(1, 1));
  EXPECT_EQ(shape_of({7}), Pair(1, 7));
}

TEST(MatrixShape, DimensionsOfSizeOneHaveNoPlaceInMemory) {
  EXPECT_EQ(shape_of({1, 197, 768}), Pair(197, 768));
  EXPECT_EQ(shape_of({1, 197, 768}, {999999, 768, 1}), Pair(197, 768));
  EXPECT_EQ(shape_of({4096, 1}), Pair(4096, 1));
  EXPECT_EQ(shape_of({1, 4096}), Pair(1, 4096));
  EXPECT_EQ(shape_of({1, 1}), Pair(1, 1));
}

TEST(MatrixShape, EmptyParameters) {
  EXPECT_EQ(shape_of({0, 5}), Pair(0, 5));
  EXPECT_EQ(shape_of({5, 0}), Pair(5, 0));
  EXPECT_EQ(shape_of({0}), Pair(1, 0));
  EXPECT_EQ((ParameterShape{{3, 0, 2}, {}}).numel(), 0);
}

TEST(NearSquareShape, LeavesATailOfLessThanARow) {
  for (const int64_t numel :
       {1, 2, 3, 10, 255, 256, 1000, 131072, 131071, 6553600, 6553601, 123456789}) {
    const MatrixShape shape = near_square_shape(numel);
    const int64_t tail = numel - shape.rows * shape.cols;
    EXPECT_GE(tail, 0) << numel;
    EXPECT_LT(tail, shape.cols) << numel;
    // Rounding 256 or more columns up by at most 15 makes the matrix at most 6 % too wide and 12 %
    // less high.
    EXPECT_LE(
        std::fabs(std::log(static_cast<double>(shape.cols) / static_cast<double>(shape.rows))),
        numel < 16 ? std::log(3.0) + 1e-9 : 0.13)
        << numel;
  }
  EXPECT_EQ(near_square_shape(1 << 20).rows, 1024);
  EXPECT_EQ(near_square_shape(1 << 17).cols % 16, 0);
  EXPECT_EQ(near_square_shape(0).rows, 0);
}

TEST(EffectiveRank, IsAtMostTheSmallerSide) {
  const auto rank_of = [](std::vector<int64_t> sizes) {
    return effective_rank({std::move(sizes), {}}, with_rank(4));
  };
  EXPECT_EQ(rank_of({10, 20}), 4);
  EXPECT_EQ(rank_of({3, 20}), 3);
  EXPECT_EQ(rank_of({20, 1}), 1);
  EXPECT_EQ(rank_of({0, 20}), 0);
}

TEST(EffectiveRank, IsTheParametersOwnIfItHasOne) {
  const auto sent = [](int64_t rank) {
    return sent_numel({{100, 80}, {}, false, rank}, with_rank(4));
  };
  EXPECT_EQ(sent(7).rank, 7);
  EXPECT_EQ(sent(1).total, 100 + 80 + 1);
  EXPECT_EQ(sent(22).rank, 22);
  EXPECT_EQ(sent(23).rank, 0);  // 180 * 23 * 2 is more than 8000
  EXPECT_EQ(sent(0).total, 100 * 80);
}

TEST(ShouldCompress, OnlyWhatPays) {
  const auto compresses = [](int64_t rows, int64_t cols, const Options& options) {
    return should_compress({{rows, cols}, {}}, options);
  };
  EXPECT_TRUE(compresses(100, 100, with_rank(1)));
  EXPECT_FALSE(compresses(4, 4, with_rank(1)));  // 8 * 1 * 2 = 16 is not less than 16
  EXPECT_TRUE(compresses(4, 4, with_rank(1, 1.99)));
  EXPECT_FALSE(compresses(1, 1000, with_rank(1)));
  EXPECT_FALSE(compresses(1000, 1, with_rank(1)));
  EXPECT_FALSE(compresses(100, 100, with_rank(25)));
  EXPECT_TRUE(compresses(100, 100, with_rank(24)));
  EXPECT_FALSE(compresses(0, 100, with_rank(1)));
  EXPECT_FALSE(compresses(0, 0, with_rank(1)));
}

TEST(ShouldCompress, NothingThatIsExact) {
  const ParameterShape exact{{100, 100}, {}, true};
  EXPECT_FALSE(should_compress(exact, with_rank(1)));
  EXPECT_EQ(sent_numel(exact, with_rank(1)).total, 100 * 100);
  const BucketPlan plan = plan_bucket({exact, {{64, 64}, {}}}, with_rank(1));
  ASSERT_EQ(plan.matrices.size(), 1u);
  EXPECT_EQ(plan.raw_numel(), 100 * 100);
}

TEST(SentNumel, IsThatOfTheFactorsAndTheActivity) {
  const SentNumel sent = sent_numel({{64, 33}, {}}, with_rank(2));
  EXPECT_EQ(sent.rank, 2);
  EXPECT_EQ(sent.p, 64 * 2);
  EXPECT_EQ(sent.q, 33 * 2);
  EXPECT_EQ(sent.total, (64 + 33) * 2 + 1);
}

TEST(SentNumel, IsAllOfAMatrixThatIsNotCompressed) {
  const SentNumel sent = sent_numel({{4, 4}, {}}, with_rank(1));
  EXPECT_EQ(sent.rank, 0);
  EXPECT_EQ(sent.p, 0);
  EXPECT_EQ(sent.q, 0);
  EXPECT_EQ(sent.total, 16);
}

TEST(SentNumel, OfAllMatricesIsThatOfTheirBucket) {
  const std::vector<ParameterShape> bucket = {{{64, 32}, {}}, {{64}, {}},   {{16, 8, 3, 3}, {}},
                                              {{2, 2}, {}},   {{0, 5}, {}}, {{}, {}}};
  const Options options = with_rank(3);
  int64_t total = 1;  // the bucket's non-finite count
  for (const ParameterShape& parameter : bucket) {
    total += sent_numel(parameter, options).total;
  }
  const BucketPlan plan = plan_bucket(bucket, options);
  ASSERT_EQ(plan.matrices.size(), 2u);
  EXPECT_EQ(plan.p_numel + plan.q_numel, total);
}

TEST(PlanBucket, LaysOutPayloads) {
  const BucketPlan plan =
      plan_bucket({{{64, 32}, {}}, {{64}, {}}, {{16, 8, 3, 3}, {}}, {{16}, {}}}, with_rank(2));
  ASSERT_EQ(plan.matrices.size(), 2u);
  EXPECT_EQ(plan.matrices[0].parameter, 0);
  EXPECT_EQ(plan.matrices[0].gradient_offset, 0);
  EXPECT_EQ(plan.matrices[0].p_offset, 0);
  EXPECT_EQ(plan.matrices[0].q_offset, 0);
  EXPECT_EQ(plan.matrices[1].parameter, 2);
  EXPECT_EQ(plan.matrices[1].shape.rows, 16);
  EXPECT_EQ(plan.matrices[1].shape.cols, 72);
  EXPECT_EQ(plan.matrices[1].rank, 2);
  EXPECT_EQ(plan.matrices[1].gradient_offset, 64 * 32 + 64);
  EXPECT_EQ(plan.matrices[1].p_offset, 64 * 2);
  EXPECT_EQ(plan.matrices[1].q_offset, 32 * 2);
  ASSERT_EQ(plan.raw.size(), 2u);
  EXPECT_EQ(plan.raw[0].gradient_offset, 64 * 32);
  EXPECT_EQ(plan.raw[0].numel, 64);
  EXPECT_EQ(plan.raw[0].p_offset, (64 + 16) * 2);
  EXPECT_EQ(plan.raw[1].gradient_offset, 64 * 32 + 64 + 16 * 72);
  EXPECT_EQ(plan.raw[1].p_offset, (64 + 16) * 2 + 64);
  EXPECT_EQ(plan.gradient_numel, 64 * 32 + 64 + 16 * 72 + 16);
  EXPECT_EQ(plan.matrices[0].use_offset, (64 + 16) * 2 + 64 + 16);
  EXPECT_EQ(plan.matrices[1].use_offset, (64 + 16) * 2 + 64 + 16 + 1);
  EXPECT_EQ(plan.p_numel, (64 + 16) * 2 + 64 + 16 + 2 + 1);
  EXPECT_EQ(plan.q_numel, (32 + 72) * 2);
  EXPECT_TRUE(plan.compresses());
}

TEST(PlanBucket, MergesRawNeighbors) {
  const BucketPlan plan = plan_bucket(
      {{{8}, {}}, {{2, 2}, {}}, {{0, 4}, {}}, {{3}, {}}, {{40, 40}, {}}, {{0}, {}}, {{5}, {}}},
      with_rank(1));
  ASSERT_EQ(plan.raw.size(), 2u);
  EXPECT_EQ(plan.raw[0].gradient_offset, 0);
  EXPECT_EQ(plan.raw[0].numel, 15);
  EXPECT_EQ(plan.raw[1].gradient_offset, 15 + 1600);
  EXPECT_EQ(plan.raw[1].numel, 5);
  EXPECT_EQ(plan.matrices[0].parameter, 4);
}

TEST(PlanBucket, WithoutAMatrixNothingIsCompressed) {
  const BucketPlan plan = plan_bucket({{{64}, {}}, {{64}, {}}}, with_rank(1));
  EXPECT_FALSE(plan.compresses());
  EXPECT_EQ(plan.gradient_numel, 128);
  EXPECT_EQ(plan.p_numel, 129);
  EXPECT_EQ(plan.q_numel, 0);
  EXPECT_FALSE(plan_bucket({}, with_rank(1)).compresses());
}

TEST(PlanFlat, OneMatrixAndItsTail) {
  const int64_t numel = 1000003;
  const BucketPlan plan = plan_flat(numel, with_rank(4));
  ASSERT_EQ(plan.matrices.size(), 1u);
  ASSERT_EQ(plan.raw.size(), 1u);
  const MatrixShape& shape = plan.matrices[0].shape;
  EXPECT_EQ(plan.raw[0].gradient_offset, shape.rows * shape.cols);
  EXPECT_EQ(shape.rows * shape.cols + plan.raw[0].numel, numel);
  EXPECT_EQ(plan.gradient_numel, numel);
}

TEST(PlanFlat, SmallTensorsStayRaw) {
  const BucketPlan plan = plan_flat(9, with_rank(1));
  EXPECT_FALSE(plan.compresses());
  EXPECT_EQ(plan.raw[0].numel, 9);
  EXPECT_FALSE(plan_flat(0, with_rank(1)).compresses());
}

}  // namespace
}  // namespace powersgd
