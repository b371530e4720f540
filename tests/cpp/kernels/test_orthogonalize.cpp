// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "kernels/fixtures/dtypes.h"
#include "kernels/fixtures/kernel_test.h"
#include "kernels/fixtures/reference.h"

namespace powersgd::test {
namespace {

struct FactorSpec {
  int64_t rows;
  int64_t rank;
};

std::string describe(const FactorSpec& spec) {
  return std::to_string(spec.rows) + "x" + std::to_string(spec.rank);
}

std::vector<FactorSpec> factor_specs() {
  std::vector<FactorSpec> specs = {{1, 1},    {7, 1},    {600, 1}, {2, 2},   {17, 3},
                                   {64, 4},   {1500, 4}, {8, 8},   {129, 8}, {32, 32},
                                   {700, 32}, {90, 40},  {5, 7},   {1, 4}};
  const auto last = std::remove_if(specs.begin(), specs.end(), [](const FactorSpec& spec) {
    return !kernels_multiply(spec.rank);
  });
  specs.erase(last, specs.end());
  return specs;
}

class Orthogonalize : public ::testing::TestWithParam<Case<FactorSpec>> {
 protected:
  Orthogonalize()
      : runner_(GetParam().runner.make()),
        rows_(GetParam().spec.rows),
        rank_(GetParam().spec.rank),
        bucket_(*runner_, spec()) {}

  // The matrix has one on either side, so that there are several offsets.
  BucketSpec spec() const { return {{{6, 9, 2}, Part::raw(3), {rows_, 3, rank_}, {11, 4, 1}}}; }

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

  using Columns = std::set<int64_t>;

  // The columns from `first` on.
  Columns from(int64_t first) const {
    Columns columns;
    for (int64_t k = first; k < rank_; ++k) columns.insert(k);
    return columns;
  }

  // The columns of p that are among `dead`, or those that are not.
  Values columns_of(const Values& p, const Columns& dead, bool of_dead) const {
    Values columns;
    for (size_t i = 0; i < p.size(); ++i) {
      const bool is_dead = dead.count(static_cast<int64_t>(i) % rank_) > 0;
      if (is_dead == of_dead) columns.push_back(p[i]);
    }
    return columns;
  }
  int64_t live_count(const Columns& dead) const {
    return rank_ - static_cast<int64_t>(dead.size());
  }

  // The columns that are not dead are orthonormal and span those of p. The dead ones are 0.
  void expect_live(const Values& p, const Columns& dead) const {
    EXPECT_EQ(bucket_.state().skipped, 0);
    const Values live = columns_of(p_hat(), dead, false);
    EXPECT_LE(orthogonality_error(live, rows_, live_count(dead)), kAllowed);
    EXPECT_LE(distance_from_span(columns_of(p, dead, false), live, rows_, live_count(dead)),
              span_tolerance());
    EXPECT_EQ(norm(columns_of(p_hat(), dead, true)), 0);
  }

  // The columns beyond the number of rows can only be zero.
  void expect_orthonormal(const Values& p) const { expect_live(p, from(live_rank())); }

  // Rounding p_hat to float moves a column by a few roundoffs for each column of the basis.
  double span_tolerance() const {
    return 4 * static_cast<double>(rank_) * unit_roundoff(DType::kFloat32);
  }

  std::unique_ptr<StageRunner> runner_;
  const int64_t rows_;
  const int64_t rank_;
  static constexpr double kAllowed = 1e-5;  // of orthonormal columns: a hundred roundoffs
  DeviceBucket bucket_;
};

TEST_P(Orthogonalize, RandomColumns) {
  Values p = random_p(1);
  run(p);
  expect_orthonormal(p);
}

TEST_P(Orthogonalize, OrthonormalColumnsStay) {
  Values p = orthonormal_basis(random_p(2), rows_, live_rank() == rank_ ? rank_ : 0);
  if (live_rank() < rank_) return;
  run(p);
  const Values result = p_hat();
  for (size_t i = 0; i < p.size(); ++i) {
    EXPECT_NEAR(result[i], p[i], 64 * unit_roundoff(DType::kFloat32));
  }
}

// Condition numbers 1e3 and 1e6, graded over the columns and mixed. The span is compared with the
// one that extended precision finds for the same rounded P. Not one direction may be lost, the
// faintest included: distance_from_span is relative to unit columns of p_hat.
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
      EXPECT_LE(orthogonality_error(p_hat(), rows_, rank_), kAllowed);
      // The solution of the triangular system carries the condition number times the roundoff of
      // double.
      const double solution = kSumTolerance * condition * kRoundoffOfDouble;
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
    expect_orthonormal(p);
  }
}

TEST_P(Orthogonalize, ZeroMatrixStaysZero) {
  Values p(static_cast<size_t>(rows_ * rank_));
  run(p);
  expect_live(p, from(0));
}

TEST_P(Orthogonalize, ZeroColumnStaysZero) {
  for (const int64_t zero : std::set{int64_t{0}, rank_ / 2, rank_ - 1}) {
    Values p = random_p(6);
    for (int64_t i = 0; i < rows_; ++i) at(p, i, zero) = 0;
    run(p);
    Columns dead{zero};
    for (int64_t k = rank_ - 1; live_count(dead) > rows_; --k) dead.insert(k);
    expect_live(p, dead);
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
  expect_live(p, from(1));
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
  expect_live(p, from(2));
}

// Epsilon alone makes the column dead.
TEST_P(Orthogonalize, EpsilonDecidesWhatIsDead) {
  if (live_rank() < 2 || rows_ < 8) return;
  for (const bool dead : {false, true}) {
    bucket_.bucket.epsilon = dead ? 1e-5 : 0;
    Values p = random_p(10);
    for (int64_t i = 0; i < rows_; ++i) at(p, i, 1) *= 1e-3;
    run(p);
    expect_live(p, dead ? Columns{1} : Columns{});
  }
}

// As many rows have elements as there are columns, or fewer. Columns that are nearly dependent take
// every pass.
TEST_P(Orthogonalize, RowsOfZerosStayZeros) {
  for (const int64_t used : std::set{rank_, rank_ / 2, int64_t{1}}) {
    for (const double apart : {1.0, 1e-6, 1e-8, 0.0}) {
      const Values first = random_p(12);
      Values p = random_p(13);
      for (int64_t i = 0; i < rows_; ++i) {
        const bool is_used = i % 3 == 1 && i / 3 < used;
        for (int64_t k = 0; k < rank_; ++k)
          at(p, i, k) = is_used ? first[static_cast<size_t>(i * rank_)] + apart * at(p, i, k) : 0;
      }
      run(p);
      EXPECT_EQ(bucket_.state().skipped, 0);
      const Values result = p_hat();
      for (size_t i = 0; i < result.size(); ++i) {
        const auto row = static_cast<int64_t>(i) / rank_;
        EXPECT_TRUE(result[i] == 0 || (row % 3 == 1 && row / 3 < used)) << row << ": " << result[i];
      }
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
  EXPECT_LE(orthogonality_error(bucket.matrices[0].p_hat->get(), 6, 2), kAllowed);
}

POWERSGD_INSTANTIATE(Orthogonalize, factor_specs());

}  // namespace
}  // namespace powersgd::test
