// SPDX-License-Identifier: BSD-3-Clause
//
// Payloads in a narrower dtype than the factors. Each stage runs on a bucket with such a wire and
// on its twin without. The twin has the exact values, which the definitions of the formats round.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "support/dtypes.h"
#include "support/kernel_test.h"

namespace powersgd::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

std::vector<KernelCase> wire_cases() {
  const std::vector<Part> mixed = {Part::raw(7), {33, 20, 4}, Part::raw(129), {0, 5, 0},
                                   {6, 0, 0},    {12, 50, 1}, Part::raw(0),   {20, 36, 2},
                                   {70, 90, 40}, Part::raw(3)};
  // Payloads that several threads share.
  const std::vector<Part> large = {{4100, 12, 4}, Part::raw(40'003), {9, 16'500, 2}};
  std::vector<BucketSpec> specs;
  const auto add = [&](const std::vector<Part>& parts, DType gradient, DType wire) {
    const bool is_double = gradient == DType::kFloat64;
    BucketSpec spec{parts, gradient, is_double ? DType::kFloat64 : DType::kFloat32};
    spec.misalignment = static_cast<int64_t>(specs.size() % 3);
    spec.tells_activity = true;
    spec.wire_dtype = wire;
    specs.push_back(spec);
  };
  for (const DType wire : {DType::kBFloat16, DType::kFloat16}) {
    for (const DType gradient :
         {DType::kFloat32, DType::kFloat64, DType::kBFloat16, DType::kFloat16}) {
      add(mixed, gradient, wire);
    }
    add(large, DType::kFloat32, wire);
  }
  add(mixed, DType::kFloat64, DType::kFloat32);
  std::vector<KernelCase> cases;
  for (const RunnerFactory& runner : stage_runners()) {
    for (const BucketSpec& spec : specs) cases.push_back({runner, spec});
  }
  return cases;
}

class Wire : public ::testing::TestWithParam<KernelCase> {
 protected:
  Wire()
      : runner_(GetParam().runner.make()),
        wire_(*runner_, GetParam().spec),
        twin_(*runner_, without_wire(GetParam().spec)) {
    if (scales()) wire_.set_scales(p_scale(), q_scale());
  }

  static BucketSpec without_wire(BucketSpec spec) {
    spec.wire_dtype.reset();
    return spec;
  }

  bool scales() const { return wire_.spec.wire() == DType::kFloat16; }
  double p_scale() const { return scales() ? 0x1p-4 : 1; }
  double q_scale() const { return scales() ? 0x1p6 : 1; }
  DType factor() const { return wire_.spec.factor_dtype(); }

  // The factor that stands for an element of the payload.
  double received(double element, double scale) const {
    return round_to(factor(), element / scale);
  }

  // The element of the payload that stands for a factor.
  double sent(double value, double scale) const {
    const double scaled = round_to(factor(), value * scale);
    return round_to(wire_.spec.wire(), round_to(DType::kFloat32, scaled));
  }

  Values all_sent(Values values, double scale) const {
    for (double& value : values) value = sent(value, scale);
    return values;
  }

  void randomize_both(uint64_t seed) {
    randomize(wire_, seed);
    randomize(twin_, seed);
  }

  void set_both_gradients(const Values& gradient) {
    wire_.gradient->set(gradient);
    twin_.gradient->set(gradient);
  }

  // Makes the same sum of P and raw segments in both payloads, with these counts.
  void set_p_sums(Values elements, double activity, double non_finite_count) {
    const auto counts = static_cast<size_t>(wire_.bucket.counts_offset);
    for (size_t i = counts; i < elements.size(); ++i) elements[i] = activity;
    elements.back() = non_finite_count;
    wire_.p_payload->set(elements);
    Values values = wire_.p_payload->get();
    for (size_t i = 0; i < counts; ++i) values[i] = received(values[i], p_scale());
    twin_.p_payload->set(values);
  }

  void set_q_sums(const Values& elements) {
    wire_.q_payload->set(elements);
    Values values = wire_.q_payload->get();
    for (double& value : values) value = received(value, q_scale());
    twin_.q_payload->set(values);
  }

  void run_both(Stage stage) {
    wire_.run(stage);
    twin_.run(stage);
  }

  Values p_elements(uint64_t seed) const { return random_values(wire_.bucket.p_numel, seed, 100); }
  Values q_elements(uint64_t seed) const { return random_values(wire_.bucket.q_numel, seed, 100); }

  void expect_equal_states() const {
    for (size_t i = 0; i < wire_.matrices.size(); ++i) {
      const DeviceMatrix& matrix = wire_.matrices[i];
      const DeviceMatrix& other = twin_.matrices[i];
      EXPECT_EQ(matrix.memory->bytes(), other.memory->bytes());
      EXPECT_EQ(matrix.p_hat->bytes(), other.p_hat->bytes());
      EXPECT_EQ(matrix.q_warm->bytes(), other.q_warm->bytes());
    }
    EXPECT_EQ(wire_.gradient->bytes(), twin_.gradient->bytes());
    EXPECT_EQ(wire_.state().skipped, twin_.state().skipped);
  }

  std::unique_ptr<StageRunner> runner_;
  TestBucket wire_, twin_;
};

TEST_P(Wire, ProjectRoundsP) {
  randomize_both(1);
  run_both(Stage::kProject);
  for (size_t i = 0; i < wire_.matrices.size(); ++i) {
    EXPECT_EQ(wire_.p_of(wire_.matrices[i]), all_sent(twin_.p_of(twin_.matrices[i]), p_scale()));
  }
  EXPECT_EQ(wire_.activities(), twin_.activities()) << "counts are not scaled";
  EXPECT_EQ(wire_.count(), 0);
  EXPECT_EQ(wire_.state().step, twin_.state().step);
  EXPECT_EQ(wire_.state().p_scale.current, wire_.state().p_scale.next);
  expect_equal_states();
}

TEST_P(Wire, ProjectCountsWhatIsNotFinite) {
  for (const double value : {kInfinity, kNaN}) {
    randomize_both(2);
    Values gradient = wire_.gradient->get();
    gradient[gradient.size() / 2] = value;
    set_both_gradients(gradient);
    run_both(Stage::kProject);
    EXPECT_EQ(wire_.count(), 1);
    expect_equal_states();
  }
}

// Each step sends the gradient with what the step before has rounded off, unless that is dropped.
TEST_P(Wire, TheRoundingOfRawSegmentsIsSentLater) {
  Values rounding(wire_.rounding->get().size());
  for (uint64_t step = 0; step < 5; ++step) {
    wire_.gradient->set(random_values(static_cast<int64_t>(wire_.gradient->get().size()), step));
    Values gradient = wire_.gradient->get();
    // An element that overflows is dropped with the step.
    if (step == 1) gradient.front() = largest(wire_.spec.gradient_dtype);
    if (step == 2) gradient.front() = kInfinity;
    wire_.gradient->set(gradient);
    wire_.bucket.drop_residual = step == 3;
    wire_.run(Stage::kProject);
    const Values payload = wire_.p_payload->get();
    for (const DeviceRaw& raw : wire_.raws) {
      for (int64_t i = 0; i < raw.numel; ++i) {
        const auto element = static_cast<size_t>(raw.p_offset + i);
        double& kept = rounding[element - static_cast<size_t>(wire_.bucket.raw_offset)];
        const double exact =
            round_to(factor(), gradient[static_cast<size_t>(raw.gradient_offset + i)] +
                                   (step == 3 ? 0 : kept));
        const double element_sent = sent(exact, p_scale());
        kept = round_to(factor(), exact - received(element_sent, p_scale()));
        if (!std::isfinite(kept)) kept = 0;
        ASSERT_EQ(payload[element], element_sent) << step << ", " << i;
      }
    }
    EXPECT_EQ(wire_.rounding->get(), rounding) << step;
  }
}

TEST_P(Wire, QIsWhatThisRankHasSent) {
  randomize_both(3);
  set_p_sums(Values(static_cast<size_t>(wire_.bucket.p_numel)), 2, 0);
  Values activities(wire_.matrices.size(), 2);
  activities[0] = 0;
  wire_.set_activities(activities);
  twin_.set_activities(activities);
  run_both(Stage::kBackProject);
  for (size_t i = 0; i < wire_.matrices.size(); ++i) {
    const Values elements = all_sent(twin_.q_of(twin_.matrices[i]), q_scale());
    EXPECT_EQ(wire_.q_of(wire_.matrices[i]), elements);
    Values values = elements;
    for (double& value : values) value = received(value, q_scale());
    EXPECT_EQ(wire_.matrices[i].q_local->get(), values);
    for (const double value : values) ASSERT_TRUE(i > 0 || value == 0);
  }
  EXPECT_EQ(wire_.state().q_scale.current, wire_.state().q_scale.next);
  expect_equal_states();
}

TEST_P(Wire, OrthogonalizeReadsTheSum) {
  randomize_both(4);
  for (const double non_finite_count : {0.0, 1.0}) {
    set_p_sums(p_elements(5), 3, non_finite_count);
    run_both(Stage::kOrthogonalize);
    EXPECT_EQ(wire_.state().skipped, non_finite_count);
    expect_equal_states();
  }
}

TEST_P(Wire, OrthogonalizeSkipsASumThatIsNotFinite) {
  const kernels::Bucket& bucket = wire_.bucket;
  for (const double value : {kInfinity, -kInfinity, kNaN}) {
    for (const int64_t i :
         {int64_t{0}, bucket.raw_offset - 1, bucket.raw_offset, bucket.counts_offset - 1}) {
      randomize_both(6);
      Values elements = p_elements(7);
      elements[static_cast<size_t>(i)] = value;
      set_p_sums(elements, 1, 0);
      wire_.run(Stage::kOrthogonalize);
      EXPECT_EQ(wire_.state().skipped, 1) << value << " at " << i;
      EXPECT_EQ(wire_.matrices[0].p_hat->bytes(), twin_.matrices[0].p_hat->bytes());
    }
  }
}

TEST_P(Wire, ReconstructReadsTheSums) {
  for (const bool skipped : {false, true}) {
    randomize_both(8);
    for (TestBucket* bucket : {&wire_, &twin_}) {
      bucket->set_skipped(skipped);
      bucket->bucket.output_scale = 1.0 / 3;
    }
    set_p_sums(p_elements(9), 1, 0);
    set_q_sums(q_elements(10));
    Values activities(wire_.matrices.size(), 1);
    activities.back() = 0;
    wire_.set_activities(activities);
    twin_.set_activities(activities);
    run_both(Stage::kReconstruct);
    expect_equal_states();
    EXPECT_EQ(std::isnan(wire_.gradient->get()[0]), skipped);
  }
}

TEST_P(Wire, ReconstructSkipsASumThatIsNotFinite) {
  randomize_both(11);
  set_p_sums(p_elements(12), 1, 0);
  Values elements = q_elements(13);
  elements.back() = kInfinity;
  set_q_sums(elements);
  run_both(Stage::kReconstruct);
  EXPECT_EQ(wire_.state().skipped, 1);
  expect_equal_states();
}

INSTANTIATE_TEST_SUITE_P(All, Wire, ::testing::ValuesIn(wire_cases()), case_name);

}  // namespace
}  // namespace powersgd::test
