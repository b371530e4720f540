// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "kernels/fixtures/dtypes.h"
#include "kernels/fixtures/kernel_test.h"
#include "kernels/fixtures/reference.h"

namespace powersgd::test {
namespace {

struct FactorSpec {
  DType dtype;
  int64_t rows;
  int64_t rank;
};

std::string describe(const FactorSpec& spec) {
  return to_string(spec.dtype) + "_" + std::to_string(spec.rows) + "x" + std::to_string(spec.rank);
}

// Kernels for columns in double have few ways of their own.
std::vector<FactorSpec> factor_specs() {
  constexpr DType kF = DType::kFloat32, kD = DType::kFloat64;
  return {{kF, 1, 1},    {kF, 7, 1},    {kF, 600, 1},  {kF, 2, 2},   {kF, 17, 3},
          {kF, 64, 4},   {kF, 1500, 4}, {kF, 8, 8},    {kF, 129, 8}, {kF, 32, 32},
          {kF, 700, 32}, {kF, 90, 40},  {kF, 5, 7},    {kF, 1, 4},   {kD, 600, 1},
          {kD, 17, 3},   {kD, 8, 8},    {kD, 600, 32}, {kD, 90, 40}, {kD, 5, 7}};
}

class Orthogonalize : public ::testing::TestWithParam<Case<FactorSpec>> {
 protected:
  Orthogonalize()
      : runner_(GetParam().runner.make()),
        rows_(GetParam().spec.rows),
        rank_(GetParam().spec.rank),
        bucket_(*runner_, spec()) {}

  // The matrix has one on either side, so that there are several offsets.
  BucketSpec spec() const {
    return {{{6, 9, 2}, Part::raw(3), {rows_, 3, rank_}, {11, 4, 1}}, GetParam().spec.dtype};
  }

  int64_t live_rank() const { return std::min(rows_, rank_); }
  const DeviceMatrix& matrix() const { return bucket_.matrices[1]; }

  // Runs the stage on P, which becomes what the payload's dtype makes of it.
  void run(Values& p) {
    Values payload = random_values(bucket_.bucket.p_numel, 99);
    std::copy(p.begin(), p.end(), payload.begin() + matrix().p_offset);
    payload.back() = 0;
    bucket_.p_payload->set(payload);
    p = bucket_.p_of(matrix());
    bucket_.run(Stage::kOrthogonalize);
  }

  Values p_hat() const { return matrix().p_hat->get(); }

  Values random_p(uint64_t seed) const { return random_values(rows_ * rank_, seed); }

  double& at(Values& p, int64_t row, int64_t column) const {
    return p[static_cast<size_t>(row * rank_ + column)];
  }

  // The first `count` columns.
  Values head(const Values& p, int64_t count) const {
    Values columns;
    for (int64_t i = 0; i < rows_; ++i) {
      for (int64_t k = 0; k < count; ++k) columns.push_back(p[static_cast<size_t>(i * rank_ + k)]);
    }
    return columns;
  }

  // The columns beyond the number of rows can only be zero.
  void expect_orthonormal() const {
    EXPECT_EQ(bucket_.state().skipped, 0);
    EXPECT_LE(orthogonality_error(head(p_hat(), live_rank()), rows_, live_rank()), allowed_);
    Values rest = p_hat();
    for (int64_t i = 0; i < rows_; ++i) {
      for (int64_t k = 0; k < live_rank(); ++k) at(rest, i, k) = 0;
    }
    EXPECT_EQ(norm(rest), 0);
  }

  // Rounding p_hat to the factor dtype moves a column by a few roundoffs for each column of the
  // basis.
  double span_tolerance() const {
    const double rounding = 4 * static_cast<double>(rank_) * unit_roundoff(GetParam().spec.dtype);
    return GetParam().spec.dtype == DType::kFloat64 ? allowed_ : rounding;
  }

  // The first `count` columns of P lie in the span of those of p_hat.
  void expect_spanned(const Values& p, int64_t count) const {
    EXPECT_LE(distance_from_span(head(p, count), head(p_hat(), count), rows_, count),
              span_tolerance());
  }

  std::unique_ptr<StageRunner> runner_;
  const int64_t rows_;
  const int64_t rank_;
  // An element of p_hat^T p_hat is a sum of products of unit columns. Columns in double are
  // orthonormal to what such a sum may lose, and columns in float to 1e-5, a hundred roundoffs.
  const double allowed_ = GetParam().spec.dtype == DType::kFloat64
                              ? kSumTolerance * unit_roundoff(DType::kFloat64)
                              : 1e-5;
  DeviceBucket bucket_;
};

TEST_P(Orthogonalize, RandomColumns) {
  Values p = random_p(1);
  run(p);
  expect_orthonormal();
  expect_spanned(p, live_rank());
}

TEST_P(Orthogonalize, OrthonormalColumnsStay) {
  Values p = orthonormal_basis(random_p(2), rows_, live_rank() == rank_ ? rank_ : 0);
  if (live_rank() < rank_) return;
  run(p);
  const Values result = p_hat();
  for (size_t i = 0; i < p.size(); ++i) {
    EXPECT_NEAR(result[i], p[i], 64 * unit_roundoff(GetParam().spec.dtype));
  }
}

// Condition numbers 1e3 and 1e6, graded over the columns and mixed. The span is compared with the
// one that extended precision finds for the same rounded P. Not one direction may be lost, the
// faintest included: distance_from_span is relative to unit columns of p_hat. At 1e3 no pivot is
// weak to columns in float, but one pass would leave columns in double far from orthonormal.
TEST_P(Orthogonalize, IllConditionedColumns) {
  if (live_rank() < rank_ || rank_ == 1) return;
  const Values left = orthonormal_basis(random_p(3), rows_, rank_);
  const Values right = orthonormal_basis(random_values(rank_ * rank_, 4), rank_, rank_);
  for (const double condition : {1e3, 1e6}) {
    for (const bool mixed : {false, true}) {
      Values p(left.size());
      for (int64_t i = 0; i < rows_; ++i) {
        for (int64_t k = 0; k < rank_; ++k) {
          const double scale =
              std::pow(condition, -static_cast<double>(k) / static_cast<double>(rank_ - 1));
          for (int64_t c = 0; c < rank_; ++c) {
            const double mix = mixed ? right[static_cast<size_t>(k * rank_ + c)] : k == c;
            at(p, i, c) += left[static_cast<size_t>(i * rank_ + k)] * scale * mix;
          }
        }
      }
      run(p);
      expect_orthonormal();
      // The solution of the triangular system carries the condition number times the roundoff of
      // double.
      const double solution = kSumTolerance * condition * unit_roundoff(DType::kFloat64);
      EXPECT_LE(distance_from_span(p_hat(), orthonormal_basis(p, rows_, rank_), rows_, rank_),
                span_tolerance() + solution);
    }
  }
}

TEST_P(Orthogonalize, ScaleDoesNotMatter) {
  for (const double scale : {1e-30, 1e30}) {
    Values p = random_p(5);
    for (double& value : p) value *= scale;
    run(p);
    expect_orthonormal();
    expect_spanned(p, live_rank());
  }
}

TEST_P(Orthogonalize, ZeroMatrixGetsRandomColumns) {
  Values p(static_cast<size_t>(rows_ * rank_));
  run(p);
  expect_orthonormal();
}

TEST_P(Orthogonalize, ZeroColumnIsReplaced) {
  for (const int64_t dead : std::set{int64_t{0}, rank_ / 2, rank_ - 1}) {
    Values p = random_p(6);
    for (int64_t i = 0; i < rows_; ++i) at(p, i, dead) = 0;
    run(p);
    EXPECT_EQ(bucket_.state().skipped, 0);
    if (live_rank() < rank_) continue;
    expect_orthonormal();
    expect_spanned(p, rank_);
  }
}

// Every column is a multiple of the first. It alone is live, and p_hat's first column is its
// direction.
TEST_P(Orthogonalize, CollinearColumns) {
  Values p = random_p(7);
  for (int64_t i = 0; i < rows_; ++i) {
    for (int64_t k = 1; k < rank_; ++k) at(p, i, k) = at(p, i, 0) * (k % 2 == 0 ? 2.0 : -0.5);
  }
  run(p);
  expect_orthonormal();
  expect_spanned(p, 1);
}

// The numeric rank is 2: the first two columns span all the others.
TEST_P(Orthogonalize, MoreColumnsThanNumericRank) {
  if (live_rank() < 3) return;
  const Values basis = random_values(rows_ * 2, 8);
  const Values mix = random_values(rank_ * 2, 9);
  Values p(static_cast<size_t>(rows_ * rank_));
  for (int64_t i = 0; i < rows_; ++i) {
    for (int64_t k = 0; k < rank_; ++k) {
      for (int64_t s = 0; s < 2; ++s) {
        at(p, i, k) += basis[static_cast<size_t>(i * 2 + s)] * mix[static_cast<size_t>(k * 2 + s)];
      }
    }
  }
  run(p);
  expect_orthonormal();
  expect_spanned(p, 2);
}

// Epsilon alone makes the column dead.
TEST_P(Orthogonalize, EpsilonDecidesWhatIsDead) {
  if (live_rank() < 2 || rows_ < 8) return;
  for (const bool dead : {false, true}) {
    bucket_.bucket.epsilon = dead ? 1e-2 : 0;
    Values p = random_p(10);
    for (int64_t i = 0; i < rows_; ++i) at(p, i, 1) *= 1e-3;
    run(p);
    expect_orthonormal();
    const double distance = distance_from_span(head(p, 2), head(p_hat(), 2), rows_, 2);
    EXPECT_EQ(distance > 1e-2, dead && rows_ > 2) << distance;
  }
}

TEST_P(Orthogonalize, DeadColumnsDependOnTheStepAlone) {
  if (live_rank() < rank_ || rows_ == 1) return;
  Values p = random_p(11);
  for (int64_t i = 0; i < rows_; ++i) at(p, i, rank_ - 1) = 0;
  const auto result = [&](uint64_t step, uint64_t seed) {
    bucket_.set_step(step);
    bucket_.bucket.seed = seed;
    run(p);
    return p_hat();
  };
  const Values first = result(1, 42);
  EXPECT_EQ(result(1, 42), first);
  for (const Values& other : {result(2, 42), result(1, 43)}) {
    EXPECT_EQ(head(other, rank_ - 1), head(first, rank_ - 1));
    if (rows_ > rank_) {
      EXPECT_NE(other, first);
    }
  }
}

// The count, or one element of one matrix, is not finite. No matrix of the bucket may change.
TEST_P(Orthogonalize, NonFiniteElementSkipsTheBucket) {
  const int64_t count = bucket_.bucket.p_numel - 1, first = matrix().p_offset;
  for (const auto& [index, value] : {std::pair{count, 1.0},
                                     {count, 3.0},
                                     {count, kNaN},
                                     {first, kInfinity},
                                     {first + rows_ * rank_ - 1, kNaN}}) {
    std::vector<Values> before;
    for (DeviceMatrix& m : bucket_.matrices) {
      m.p_hat->set(random_values(m.part.rows * m.part.rank, 14));
      before.push_back(m.p_hat->get());
    }
    Values payload = random_values(bucket_.bucket.p_numel, 15);
    payload.back() = 0;
    payload[static_cast<size_t>(index)] = value;
    bucket_.p_payload->set(payload);
    bucket_.run(Stage::kOrthogonalize);
    EXPECT_EQ(bucket_.state().skipped, 1) << value << " at " << index;
    for (size_t i = 0; i < before.size(); ++i) {
      EXPECT_EQ(bucket_.matrices[i].p_hat->get(), before[i]);
    }
  }
}

// A raw segment that overflows in the sum does not skip the step, as with a plain allreduce.
TEST_P(Orthogonalize, RawSegmentsDoNotSkip) {
  Values payload = random_values(bucket_.bucket.p_numel, 16);
  payload[static_cast<size_t>(bucket_.raws[0].p_offset)] = kInfinity;
  payload.back() = 0;
  bucket_.p_payload->set(payload);
  bucket_.run(Stage::kOrthogonalize);
  EXPECT_EQ(bucket_.state().skipped, 0);
}

TEST_P(Orthogonalize, TheSkipOfTheLastStepIsOverwritten) {
  bucket_.set_skipped(true);
  Values p = random_p(17);
  run(p);
  EXPECT_EQ(bucket_.state().skipped, 0);
}

TEST_P(Orthogonalize, MatrixOutOfUseKeepsItsColumns) {
  BucketSpec telling = spec();
  telling.tells_use = true;
  DeviceBucket bucket(*runner_, telling);
  randomize(bucket, 21);
  const Values before = bucket.matrices[1].p_hat->get();
  Values payload = random_values(bucket.bucket.p_numel, 22);
  payload.back() = 0;
  bucket.p_payload->set(payload);
  bucket.set_uses({2, 0, 1});
  bucket.run(Stage::kOrthogonalize);
  EXPECT_EQ(bucket.matrices[1].p_hat->get(), before);
  EXPECT_LE(orthogonality_error(bucket.matrices[0].p_hat->get(), 6, 2), allowed_);
}

POWERSGD_INSTANTIATE(Orthogonalize, factor_specs());

}  // namespace
}  // namespace powersgd::test
