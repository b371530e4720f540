// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <tuple>

#include "kernels/fixtures/dtypes.h"
#include "kernels/fixtures/kernel_test.h"
#include "kernels/fixtures/reference.h"
#include "kernels/shared/philox.h"

namespace powersgd::test {
namespace {

class Reconstruct : public KernelTest {
 protected:
  // The state of a bucket after both reductions.
  void randomize_step(uint64_t seed) {
    randomize(bucket_, seed);
    bucket_.p_payload->set(random_values(bucket_.bucket.p_numel, seed + 100));
    bucket_.q_payload->set(random_values(bucket_.bucket.q_numel, seed + 200));
    bucket_.set_skipped(false);
    for (const DeviceMatrix& matrix : bucket_.matrices) {
      matrix.q_norms->set(Values(static_cast<size_t>(matrix.part.rank), -1));
    }
  }

  // One rounding to the gradient dtype after a chain of `operations`.
  void expect_gradient(const Values& actual, const Checked& expected, int64_t operations) const {
    const DType dtype = bucket_.spec.gradient_dtype;
    expect_close(actual, expected,
                 static_cast<double>(operations) * roundoff() + unit_roundoff(dtype),
                 dtype == DType::kFloat16 ? std::ldexp(1.0, -25) : 0);
  }

  struct Before {
    Values memory, q_warm, gradient;
  };
  std::vector<Before> matrices_before() const {
    std::vector<Before> before;
    for (const DeviceMatrix& matrix : bucket_.matrices) {
      before.push_back({matrix.memory->get(), matrix.q_warm->get(), bucket_.gradient_of(matrix)});
    }
    return before;
  }

  // Runs the stage, which must find that the step is to be skipped.
  void run_and_expect_skipped() {
    const std::vector<Before> before = matrices_before();
    bucket_.run(Stage::kReconstruct);
    EXPECT_EQ(bucket_.state().skipped, 1);
    for (const double g : bucket_.gradient->get()) ASSERT_TRUE(std::isnan(g));
    for (size_t i = 0; i < before.size(); ++i) check_taken_back(bucket_.matrices[i], before[i]);
  }

  // memory = M - G, q_local = 0, q_warm as before.
  void check_taken_back(const DeviceMatrix& matrix, const Before& before) const {
    Checked expected{before.memory, before.memory};
    const Values gradient = finite(before.gradient);
    for (size_t i = 0; i < gradient.size(); ++i) {
      expected.value[i] -= gradient[i];
      expected.magnitude[i] = std::fabs(before.memory[i]) + std::fabs(gradient[i]);
    }
    const DType residual = bucket_.bucket.residual_dtype;
    expect_close(matrix.memory->get(), expected, roundoff() + unit_roundoff(residual));
    EXPECT_EQ(matrix.q_warm->get(), before.q_warm);
    EXPECT_EQ(norm(matrix.q_local->get()), 0);
    EXPECT_EQ(norm(matrix.q_norms->get()), 0);
  }
};

// Memory and the local factors stay as they are.
TEST_P(Reconstruct, MatchesTheReference) {
  for (const double scale : {1.0, 1.0 / 3}) {
    randomize_step(1);
    std::vector<Values> kept;
    for (const DeviceMatrix& matrix : bucket_.matrices) {
      kept.push_back(matrix.memory->get());
      kept.push_back(matrix.q_local->get());
    }
    bucket_.bucket.output_scale = scale;
    bucket_.run(Stage::kReconstruct);
    EXPECT_EQ(bucket_.state().skipped, 0);
    auto before = kept.begin();
    for (const DeviceMatrix& matrix : bucket_.matrices) {
      EXPECT_EQ(matrix.memory->get(), *before++);
      EXPECT_EQ(matrix.q_local->get(), *before++);
      const Checked product =
          reference_product(matrix.part, matrix.p_hat->get(), bucket_.q_of(matrix));
      expect_gradient(bucket_.gradient_of(matrix),
                      {scaled(product.value, scale), scaled(product.magnitude, scale)},
                      matrix.part.rank + 3);
    }
    const Values payload = bucket_.p_payload->get();
    for (const DeviceRaw& raw : bucket_.raws) {
      expect_gradient(DeviceBucket::slice(bucket_.gradient->get(), raw.gradient_offset, raw.numel),
                      checked(scaled(DeviceBucket::slice(payload, raw.p_offset, raw.numel), scale)),
                      3);
    }
  }
}

// The norms are those of the rows of Q. Their squares are summed in double.
TEST_P(Reconstruct, WarmStartHasUnitRows) {
  randomize_step(2);
  bucket_.run(Stage::kReconstruct);
  for (const DeviceMatrix& matrix : bucket_.matrices) {
    const Values q = bucket_.q_of(matrix), q_warm = matrix.q_warm->get();
    const Values norms = matrix.q_norms->get();
    ASSERT_EQ(static_cast<int64_t>(norms.size()), matrix.part.rank);
    for (int64_t k = 0; k < matrix.part.rank; ++k) {
      const Values row = DeviceBucket::slice(q, k * matrix.part.cols, matrix.part.cols);
      const double length = norm(row);
      expect_close(DeviceBucket::slice(q_warm, k * matrix.part.cols, matrix.part.cols),
                   checked(scaled(row, 1 / length)), 4 * roundoff());
      EXPECT_NEAR(norms[static_cast<size_t>(k)], length, 1e-13 * length);
    }
  }
}

// The next start of a zero row is half random, in numbers of about unit norm that all ranks draw
// alike: by the seed, the matrix, the step, the row and the column.
TEST_P(Reconstruct, ZeroRowIsDrawnAnew) {
  std::set<float> drawn;
  size_t count = 0;
  for (const auto& [seed, step] : {std::pair<uint64_t, uint64_t>{5, 0}, {5, 1}, {6, 0}}) {
    randomize_step(3);
    const std::vector<Before> before = matrices_before();
    bucket_.bucket.seed = seed;
    bucket_.set_step(step);
    Values q = bucket_.q_payload->get();
    for (const DeviceMatrix& matrix : bucket_.matrices) {  // all but the first row
      const auto begin = q.begin() + matrix.q_offset;
      std::fill(begin + std::min<int64_t>(matrix.part.rank, 1) * matrix.part.cols,
                begin + matrix.part.rank * matrix.part.cols, 0);
    }
    bucket_.q_payload->set(q);
    bucket_.run(Stage::kReconstruct);
    EXPECT_EQ(bucket_.state().skipped, 0);
    for (size_t i = 0; i < before.size(); ++i) {
      const Part& part = bucket_.matrices[i].part;
      const double exponent = std::ceil(std::log2(static_cast<double>(part.cols) / 3) / 2);
      const double scale = std::exp2(-std::max(exponent, 0.0));
      const Values q_warm = bucket_.matrices[i].q_warm->get();
      Checked expected;
      for (int64_t k = 1; k < part.rank; ++k) {
        for (int64_t j = 0; j < part.cols; ++j) {
          const float random =
              kernels::random_element(seed, 100 + i, step, kernels::RandomUse::kZeroRow,
                                      static_cast<uint32_t>(k), static_cast<uint64_t>(j));
          const double old = before[i].q_warm[static_cast<size_t>(k * part.cols + j)];
          expected.value.push_back((old + scale * random) / 2);
          expected.magnitude.push_back((std::fabs(old) + std::fabs(scale * random)) / 2);
          drawn.insert(random);
          ++count;
        }
      }
      const auto size = static_cast<int64_t>(expected.value.size());
      expect_close(DeviceBucket::slice(q_warm, part.numel() > 0 ? part.cols : 0, size), expected,
                   roundoff());
    }
  }
  // No number is used twice. Of 2^24 values, chance repeats few.
  EXPECT_GE(drawn.size(), count - count / 50);
}

// P and Q do not matter.
TEST_P(Reconstruct, MatrixOutOfUseGetsZerosAndKeepsItsResidual) {
  BucketSpec spec = GetParam().spec;
  spec.tells_use = true;
  DeviceBucket bucket(*runner_, spec);
  for (size_t idle = 0; idle < bucket.matrices.size(); ++idle) {
    randomize(bucket, 10);
    bucket.q_payload->set(random_values(bucket.bucket.q_numel, 210));
    Values reduced(bucket.matrices.size(), 2);
    reduced[idle] = 0;
    bucket.set_uses(reduced);
    const DeviceMatrix& matrix = bucket.matrices[idle];
    const Values memory = matrix.memory->get(), q_warm = matrix.q_warm->get();
    bucket.run(Stage::kReconstruct);
    EXPECT_EQ(bucket.state().skipped, 0);
    EXPECT_EQ(norm(bucket.gradient_of(matrix)), 0);
    EXPECT_EQ(norm(matrix.q_local->get()), 0);
    EXPECT_EQ(norm(matrix.q_norms->get()), 0);
    EXPECT_EQ(matrix.memory->get(), memory);
    EXPECT_EQ(matrix.q_warm->get(), q_warm);
    for (size_t i = 0; i < bucket.matrices.size(); ++i) {
      const DeviceMatrix& other = bucket.matrices[i];
      if (i == idle || other.part.numel() == 0) continue;
      EXPECT_GT(norm(bucket.gradient_of(other)), 0);
      EXPECT_GT(norm(other.q_local->get()), 0);
      EXPECT_GT(norm(other.q_norms->get()), 0);
    }
  }
}

TEST_P(Reconstruct, SkipsWhenOrthogonalizeSaidSo) {
  randomize_step(5);
  Values gradient = bucket_.gradient->get();
  for (size_t i = 0; i < gradient.size(); i += 41) gradient[i] = i % 2 == 0 ? kNaN : kInfinity;
  bucket_.gradient->set(gradient);
  bucket_.set_skipped(true);
  run_and_expect_skipped();
}

TEST_P(Reconstruct, SkipsWhenAnElementOfQIsNotFinite) {
  for (const double value : {kInfinity, -kInfinity, kNaN}) {
    for (const int64_t index : {int64_t{0}, bucket_.bucket.q_numel - 1}) {
      if (bucket_.bucket.q_numel == 0) continue;
      randomize_step(6);
      Values q = bucket_.q_payload->get();
      q[static_cast<size_t>(index)] = value;
      bucket_.q_payload->set(q);
      run_and_expect_skipped();
    }
  }
}

TEST_P(Reconstruct, SkipsWithoutErrorFeedback) {
  BucketSpec spec = GetParam().spec;
  spec.error_feedback = false;
  DeviceBucket bucket(*runner_, spec);
  randomize(bucket, 8);
  bucket.set_skipped(true);
  bucket.run(Stage::kReconstruct);
  for (const double g : bucket.gradient->get()) ASSERT_TRUE(std::isnan(g));
}

POWERSGD_INSTANTIATE(Reconstruct, bucket_specs());

// A step counts once, even if it is skipped in several buckets.
TEST(SkippedSteps, AreCountedOnceForAllBuckets) {
  struct Skip {
    uint64_t step;
    bool first, second;
    uint64_t expected;
  };
  for (const RunnerFactory& factory : stage_runners()) {
    const auto runner = factory.make();
    const BucketSpec spec{{{17, 33, 4}}};
    DeviceBucket first(*runner, spec), second(*runner, spec);
    SharedSkippedSteps skipped_steps(*runner);
    for (const Skip& skip :
         {Skip{0, true, true, 1}, Skip{1, false, true, 2}, Skip{2, false, false, 2},
          Skip{3, true, false, 3}, Skip{7, true, true, 4}}) {
      for (auto& [bucket, skipped] :
           {std::pair<DeviceBucket&, bool>{first, skip.first}, {second, skip.second}}) {
        bucket.bucket.skipped_steps = skipped_steps.data();
        bucket.set_step(skip.step);
        bucket.set_skipped(skipped);
        bucket.run(Stage::kReconstruct);
        EXPECT_EQ(bucket.state().skipped, skipped ? 1 : 0);
      }
      EXPECT_EQ(skipped_steps.get(), skip.expected) << "after step " << skip.step;
    }
  }
}

}  // namespace
}  // namespace powersgd::test
