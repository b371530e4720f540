// SPDX-License-Identifier: BSD-3-Clause
#include "support/kernel_test.h"

#include <algorithm>

#include "support/reference.h"

namespace powersgd::test {
namespace {

std::vector<BucketSpec> bucket_specs() {
  const std::vector<std::vector<Part>> shapes_of_all_dtypes = {
      {{17, 33, 4}},
      {{9, 2100, 4}},
      {{70, 90, 40}},
      {Part::raw(7), {33, 20, 4}, Part::raw(129), {12, 50, 1}, {20, 36, 2}, Part::raw(3)}};
  const std::vector<std::vector<Part>> other_shapes = {
      {{1, 37, 1}},
      {{41, 1, 1}},
      {{3, 5, 2}},
      {{129, 257, 8}},
      {{64, 27, 3}},
      {{700, 40, 5}},
      {{5, 9, 7}},
      {{1, 1, 1}},
      {{0, 5, 0}, {6, 0, 0}, Part::raw(0), {8, 8, 1}},
      {Part::raw(66000)},
      {{300, 130, 16}},
      {{9, 16500, 2}, {3, 17001, 1}},
      {{4100, 12, 4}, {2100, 9, 3}},
      {{33000, 5, 2}}};
  // Whole vectors, on aligned addresses, at the ranks that kernels are made for.
  const std::vector<std::vector<Part>> aligned_shapes = {{{70, 516, 1}},
                                                         {{65, 1032, 2}},
                                                         {{300, 256, 4}},
                                                         {{300, 256, 8}},
                                                         {{600, 136, 16}},
                                                         {{1030, 36, 32}},
                                                         {{90, 264, 12}, {70, 64, 3}}};
  const std::vector<std::pair<DType, DType>> dtypes = {
      {DType::kFloat32, DType::kFloat32},  {DType::kFloat64, DType::kFloat64},
      {DType::kBFloat16, DType::kFloat32}, {DType::kBFloat16, DType::kBFloat16},
      {DType::kFloat16, DType::kFloat32},  {DType::kFloat16, DType::kFloat16},
      {DType::kFloat32, DType::kBFloat16}};
  std::vector<BucketSpec> specs;
  for (const auto& parts : shapes_of_all_dtypes) {
    for (const auto& [gradient, residual] : dtypes) {
      specs.push_back({parts, gradient, residual});
      specs.back().misalignment = specs.size() % 3;
    }
  }
  for (const auto& parts : other_shapes) {
    specs.push_back({parts});
    specs.back().misalignment = specs.size() % 3;
  }
  for (const auto& parts : aligned_shapes) specs.push_back({parts});
  // A rank of bfloat16 products that is no multiple of 8, and other kinds of storage.
  for (const auto& [gradient, residual] : dtypes) {
    if (gradient == DType::kFloat64) continue;
    specs.push_back({{{37, 150, 20}}, gradient, residual});
    specs.back().misalignment = specs.size() % 2;
  }
  return specs;
}

int64_t largest_rank(const BucketSpec& spec) {
  int64_t largest = 0;
  for (const Part& part : spec.parts) largest = std::max(largest, part.rank);
  return largest;
}

}  // namespace

std::vector<KernelCase> kernel_cases() {
  std::vector<KernelCase> cases;
  for (const BucketSpec& spec : bucket_specs()) {
    for (const RunnerFactory& runner : stage_runners()) cases.push_back({runner, spec});
    const int64_t rank = largest_rank(spec);
    if (run_cpu_kernels() || rank < 9 || rank > 32 || spec.factor_dtype() == DType::kFloat64)
      continue;
    BucketSpec rounding = spec;
    rounding.bfloat16_products = true;
    for (const RunnerFactory& runner : stage_runners()) cases.push_back({runner, rounding});
  }
  return cases;
}

std::string case_name(const ::testing::TestParamInfo<KernelCase>& info) {
  return info.param.runner.name + "_" + describe(info.param.spec);
}

void randomize(TestBucket& bucket, uint64_t seed) {
  int64_t numel = 0;
  for (const Part& part : bucket.spec.parts) numel += part.numel();
  bucket.gradient->set(random_values(numel, seed));
  for (DeviceMatrix& matrix : bucket.matrices) {
    const Part& part = matrix.part;
    if (matrix.memory) matrix.memory->set(random_values(part.numel(), ++seed));
    matrix.p_hat->set(
        orthonormal_basis(random_values(part.rows * part.rank, ++seed), part.rows, part.rank));
    matrix.q_local->set(random_values(part.cols * part.rank, ++seed));
    matrix.q_warm->set(random_values(part.cols * part.rank, ++seed));
  }
}

}  // namespace powersgd::test
