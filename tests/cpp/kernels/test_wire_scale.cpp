// SPDX-License-Identifier: BSD-3-Clause
//
// The scales of a float16 wire, which follow from the sums.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "kernels/shared/wire.h"
#include "support/dtypes.h"
#include "support/kernel_test.h"

namespace powersgd::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// Returns the largest power of two that takes `largest` to 2048 or less, by trying them all.
double fitting_scale(double largest) {
  for (int k = 100; k > -100; --k) {
    if (std::ldexp(largest, k) <= 2048) return std::ldexp(1.0, k);
  }
  return 0x1p-100;
}

TEST(NextScale, TakesTheLargestElementTo2048) {
  std::vector<double> sums = {5e-324, 1e-300, 1e-45, 1e-38, 0.3, 0.6, 0.7, 3e38, 1e300};
  for (int k = -130; k < 128; ++k) {
    const double power = std::ldexp(1.0, k);
    for (const double sum :
         {power, std::nextafter(power, 0), std::nextafter(power, kInfinity), 1.5 * power}) {
      sums.push_back(sum);
    }
  }
  for (const double sum : sums) {
    EXPECT_EQ(kernels::next_scale(sum, 0), fitting_scale(sum)) << sum;
    EXPECT_EQ(kernels::next_scale(sum, 0x1p-3F), fitting_scale(sum)) << sum;
  }
}

TEST(NextScale, StaysIfNothingIsSent) {
  EXPECT_EQ(kernels::next_scale(0, 0), 1);
  EXPECT_EQ(kernels::next_scale(0, 0x1p9F), 0x1p9F);
}

TEST(NextScale, FallsAfterAnOverflow) {
  for (const double sum : {kInfinity, kNaN}) {
    EXPECT_EQ(kernels::next_scale(sum, 0), 0x1p-8F);
    EXPECT_EQ(kernels::next_scale(sum, 0x1p20F), 0x1p12F);
    EXPECT_EQ(kernels::next_scale(sum, 0x1p-95F), 0x1p-100F);
    EXPECT_EQ(kernels::next_scale(sum, 0x1p-100F), 0x1p-100F);
  }
}

struct ScaleCase {
  RunnerFactory runner;
  DType gradient_dtype;
};

std::ostream& operator<<(std::ostream& stream, const ScaleCase& c) {
  return stream << c.runner.name << "_" << to_string(c.gradient_dtype);
}

std::vector<ScaleCase> scale_cases() {
  std::vector<ScaleCase> cases;
  for (const RunnerFactory& runner : stage_runners()) {
    for (const DType dtype : {DType::kFloat32, DType::kFloat64}) cases.push_back({runner, dtype});
  }
  return cases;
}

// Steps of a bucket whose raw segment has the values to be sent. A matrix travels along.
class ScaledWire : public ::testing::TestWithParam<ScaleCase> {
 protected:
  ScaledWire() : runner_(GetParam().runner.make()), bucket_(*runner_, spec()) {
    bucket_.run(Stage::kRandomStart);
    bucket_.travel_as(spec().factor_dtype());  // as the first payloads do
  }

  static BucketSpec spec() {
    const DType dtype = GetParam().gradient_dtype;
    BucketSpec spec{{Part::raw(4), {3, 5, 1}}, dtype, dtype};
    spec.tells_activity = true;
    spec.wire_dtype = DType::kFloat16;
    return spec;
  }

  // Projects a gradient whose raw segment has these values. The matrix's is zero.
  void project(const Values& values) {
    Values gradient(bucket_.gradient->get().size());
    std::copy(values.begin(), values.end(), gradient.begin());
    bucket_.gradient->set(gradient);
    bucket_.run(Stage::kProject);
  }

  static void multiply(DeviceArray& payload, double factor) {
    Values values = payload.get();
    for (double& value : values) value *= factor;
    payload.set(values);
  }

  // Goes on with the sum over that many ranks of equal gradients, and ends the step.
  void sum_and_end(double ranks = 2) {
    multiply(*bucket_.p_payload, ranks);
    bucket_.run(Stage::kOrthogonalize);
    bucket_.run(Stage::kBackProject);
    multiply(*bucket_.q_payload, ranks);
    bucket_.run(Stage::kReconstruct);
    if (bucket_.bucket.wire_dtype != DType::kFloat16) bucket_.travel_as(DType::kFloat16);
    ++bucket_.bucket.step;
  }

  void step(const Values& values) {
    project(values);
    sum_and_end();
  }

  bool skipped() const { return bucket_.state().skipped != 0; }
  double next() const { return bucket_.state().p_scale.next; }
  double output(int64_t i) const { return bucket_.gradient->get()[static_cast<size_t>(i)]; }
  double element(int64_t i) const {
    return bucket_.p_payload->get()[static_cast<size_t>(bucket_.raws[0].p_offset + i)];
  }

  std::unique_ptr<StageRunner> runner_;
  TestBucket bucket_;
};

TEST_P(ScaledWire, TheFirstPayloadTravelsAsItIs) {
  step({1e6, 1e-9, 0, 0});
  EXPECT_FALSE(skipped());
  EXPECT_EQ(output(0), 2e6);
  EXPECT_EQ(output(1), round_to(bucket_.spec.factor_dtype(), 1e-9) * 2);
}

// Sums of all sizes come to between 2^10 and 2^11 on the wire, in which float16 rounds to 2^-11.
TEST_P(ScaledWire, ASumLikeTheLastOneFits) {
  for (const double size : {1e-25, 3e-9, 0.7, 1.0, 5e4, 1e25}) {
    const Values values = {size, -size / 3, size / 7, -size / 500};
    bucket_.travel_as(bucket_.spec.factor_dtype());
    bucket_.rounding->set(Values(4));
    step(values);
    EXPECT_EQ(next(), fitting_scale(2 * round_to(bucket_.spec.factor_dtype(), size)));
    project(values);
    EXPECT_GT(2 * element(0), 0x1p10) << size;
    EXPECT_LE(2 * element(0), 0x1p11) << size;
    EXPECT_EQ(bucket_.activities()[0], 0) << "counts are not scaled";
    sum_and_end();
    EXPECT_FALSE(skipped());
    for (size_t i = 0; i < 4; ++i) {
      EXPECT_NEAR(output(static_cast<int64_t>(i)), 2 * values[i],
                  std::abs(values[i]) * 2 * 0x1.01p-11);
    }
  }
}

TEST_P(ScaledWire, AStepMayGrowAndOneThatGrowsTooMuchIsSkipped) {
  step({1.1, 1, 1, 1});
  step({31 * 1.1, 1, 1, 1});
  EXPECT_FALSE(skipped());
  EXPECT_NEAR(output(0), 62 * 1.1, 62 * 1.1 * 0x1.01p-11);
  step({31 * 1.1 * 70, 1, 1, 1});
  EXPECT_TRUE(skipped());
  EXPECT_TRUE(std::isnan(output(0)));
}

TEST_P(ScaledWire, AfterAnOverflowTheScaleIsSmaller) {
  step({0.5, 1, 1, 1});
  const double scale = next();
  EXPECT_EQ(scale, 0x1p10);
  step({kInfinity, 1, 1, 1});
  EXPECT_TRUE(skipped());
  EXPECT_EQ(next(), scale / 256);
  step({0.5, 1, 1, 1});
  EXPECT_EQ(next(), scale);
  // However often steps overflow, the largest that float32 holds still travel.
  for (int i = 0; i < 30; ++i) step({kInfinity, 1, 1, 1});
  step({1e33, 0, 0, 0});
  EXPECT_FALSE(skipped());
  EXPECT_NEAR(output(0), 2e33, 2e33 * 0x1.01p-11);
}

TEST_P(ScaledWire, AStepWithoutValuesKeepsTheScale) {
  step({0.25, 0.125, 0, 0});
  const double scale = next();
  step(Values(4));
  EXPECT_EQ(next(), scale);
}

TEST_P(ScaledWire, RanksOfUnlikeValuesHaveTheScaleOfTheirSum) {
  project({101, 0, 0, 0});
  sum_and_end(1);
  const double large = next();
  bucket_.travel_as(bucket_.spec.factor_dtype());
  project({1, 0, 0, 0});
  sum_and_end(101);
  EXPECT_EQ(next(), large);
}

// Q has a scale of its own, which follows from its own sum.
TEST_P(ScaledWire, TheScaleOfQFollowsFromItsSum) {
  EXPECT_EQ(bucket_.state().q_scale.next, 0);
  Values gradient = random_values(4 + 15, 1);
  gradient[0] = 1e6;  // in the raw segment
  bucket_.gradient->set(gradient);
  bucket_.run(Stage::kProject);
  bucket_.run(Stage::kOrthogonalize);
  bucket_.run(Stage::kBackProject);
  double largest = 0;
  for (const double value : bucket_.q_payload->get()) {
    largest = std::max(largest, std::abs(value));
  }
  bucket_.run(Stage::kReconstruct);
  EXPECT_EQ(bucket_.state().q_scale.next, fitting_scale(largest));
  EXPECT_NE(bucket_.state().q_scale.next, next());
  bucket_.travel_as(DType::kFloat16);
  bucket_.q_payload->set(Values(5, kInfinity));
  bucket_.run(Stage::kReconstruct);
  EXPECT_EQ(bucket_.state().q_scale.next, fitting_scale(largest) / 256);
}

INSTANTIATE_TEST_SUITE_P(All, ScaledWire, ::testing::ValuesIn(scale_cases()), [](const auto& info) {
  return info.param.runner.name + "_" + to_string(info.param.gradient_dtype);
});

}  // namespace
}  // namespace powersgd::test
