// SPDX-License-Identifier: BSD-3-Clause
//
// Every stage gives the same bits for any number of threads, and whether or not the host waits for
// it. The stages whose results all ranks must agree on also do so on any instruction set.
#include <gtest/gtest.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "kernels/fixtures/kernel_test.h"

namespace powersgd::test {
namespace {

constexpr Stage kStagesOfStep[] = {Stage::kProject, Stage::kOrthogonalize, Stage::kBackProject,
                                   Stage::kReconstruct};

std::vector<BucketSpec> specs() {
  const std::vector<Part> parts = {
      {600, 70, 4}, Part::raw(70001), {33, 3000, 5}, {2100, 9, 8}, Part::raw(3)};
  const std::vector<Part> any_rank = {{90, 140, 36}, {33, 40, 2}};
  std::vector<BucketSpec> specs = {{parts, DType::kFloat32, DType::kFloat32},
                                   {parts, DType::kBFloat16, DType::kBFloat16},
                                   {any_rank, DType::kFloat16, DType::kBFloat16}};
  for (const bool bfloat16_products : {false, true}) {
    specs.push_back({{{90, 140, 32}, {40, 300, 12}}, DType::kBFloat16, DType::kFloat32});
    specs.back().bfloat16_products = bfloat16_products;
  }
  const auto last = std::remove_if(specs.begin(), specs.end(),
                                   [](const BucketSpec& spec) { return !kernels_multiply(spec); });
  specs.erase(last, specs.end());
  return specs;
}

// Two steps, of which the second one starts from all that the first one leaves. The host reads
// nothing meanwhile, so that a runner may launch all stages at once. Gradients of rank 1 make
// orthogonalize take all its passes, for which back_project has to wait.
std::vector<uint8_t> run_all_stages(const RunnerFactory& factory, const BucketSpec& spec,
                                    bool deficient) {
  const std::unique_ptr<StageRunner> runner = factory.make();
  DeviceBucket bucket(*runner, spec);
  if (deficient)
    bucket.gradient->set(Values(bucket.gradient->get().size(), 1));
  else
    randomize(bucket, 1);
  bucket.run(Stage::kRandomStart);
  for (int step = 0; step < 2; ++step) {
    for (const Stage stage : kStagesOfStep) bucket.run(stage);
    ++bucket.bucket.step;
  }
  return bucket.state_bytes();
}

void expect_same_bits(const BucketSpec& spec, bool deficient) {
  for (const std::vector<RunnerFactory>& group : runners_equal_in_all_stages()) {
    const std::vector<uint8_t> expected = run_all_stages(group[0], spec, deficient);
    for (size_t i = 1; i < group.size(); ++i) {
      EXPECT_TRUE(run_all_stages(group[i], spec, deficient) == expected)
          << group[i].name << ": " << describe(spec);
    }
  }
}

TEST(Reproducible, AnyNumberOfThreads) {
  for (const BucketSpec& spec : specs()) expect_same_bits(spec, false);
}

TEST(Reproducible, AnyNumberOfThreadsWhereColumnsAreDead) {
  for (const BucketSpec& spec : {specs().front(), specs().back()}) expect_same_bits(spec, true);
}

// Behind a parameter of odd size the gradient alone is off its alignment.
TEST(Reproducible, AnyPlaceOfTheGradient) {
  const std::vector<Part> parts = {{200, 256, 4}, {64, 132, 2}};
  const std::vector<Part> high = {{200, 256, 16}, {70, 132, 9}};
  const auto [float32, bfloat16] = std::pair(DType::kFloat32, DType::kBFloat16);
  std::vector<BucketSpec> specs = {{parts, float32, float32},
                                   {parts, bfloat16, bfloat16},
                                   {parts, DType::kFloat16, float32, false},
                                   {high, float32, float32},
                                   {high, bfloat16, bfloat16}};
  for (const size_t i : {3, 4}) {
    specs.push_back(specs[i]);
    specs.back().bfloat16_products = true;
  }
  for (const RunnerFactory& runner : stage_runners()) {
    for (BucketSpec spec : specs) {
      const std::vector<uint8_t> expected = run_all_stages(runner, spec, false);
      for (spec.gradient_shift = 1; spec.gradient_shift < 4; ++spec.gradient_shift)
        EXPECT_TRUE(run_all_stages(runner, spec, false) == expected)
            << runner.name << ": " << describe(spec);
    }
  }
}

// The input factors are fixed, because project and back_project may round differently.
std::vector<uint8_t> run_shared_stages(const RunnerFactory& factory, const BucketSpec& spec,
                                       bool ill_conditioned) {
  const std::unique_ptr<StageRunner> runner = factory.make();
  DeviceBucket bucket(*runner, spec);
  randomize(bucket, 2);
  Values p = random_values(bucket.bucket.p_numel, 3);
  for (size_t i = 0; ill_conditioned && i < p.size(); i += 2) p[i] *= 1e-6;
  for (size_t i = 0; ill_conditioned && i < p.size(); i += 7) p[i] = 0;
  p.back() = 0;
  bucket.p_payload->set(p);
  bucket.q_payload->set(random_values(bucket.bucket.q_numel, 4));
  bucket.bucket.output_scale = 1.0 / 3;
  bucket.run(Stage::kRandomStart);
  bucket.run(Stage::kOrthogonalize);
  bucket.run(Stage::kReconstruct);
  EXPECT_EQ(bucket.state().skipped, 0);
  return bucket.state_bytes();
}

TEST(Reproducible, AnyInstructionSet) {
  const std::vector<RunnerFactory> runners = runners_equal_in_shared_stages();
  for (const BucketSpec& spec : specs()) {
    for (const bool ill_conditioned : {false, true}) {
      const std::vector<uint8_t> expected = run_shared_stages(runners[0], spec, ill_conditioned);
      for (size_t i = 1; i < runners.size(); ++i) {
        EXPECT_TRUE(run_shared_stages(runners[i], spec, ill_conditioned) == expected)
            << runners[i].name;
      }
    }
  }
}

}  // namespace
}  // namespace powersgd::test
