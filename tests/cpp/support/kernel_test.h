// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "support/stage_runner.h"
#include "support/test_bucket.h"

namespace powersgd::test {

struct KernelCase {
  RunnerFactory runner;
  BucketSpec spec;
};

inline std::ostream& operator<<(std::ostream& stream, const KernelCase& test_case) {
  return stream << test_case.runner.name << "_" << describe(test_case.spec);
}

// Returns every runner with buckets of all dtypes and of odd shapes: one row, one column, no
// multiple of any vector, more rank than rows, more rank than a micro-kernel packs, several blocks
// and partial sums, raw segments between matrices, nothing at all, every array off its alignment.
std::vector<KernelCase> kernel_cases();

std::string case_name(const ::testing::TestParamInfo<KernelCase>& info);

// A bucket of the case's spec, on a runner of its own.
class KernelTest : public ::testing::TestWithParam<KernelCase> {
 protected:
  KernelTest() : runner_(GetParam().runner.make()), bucket_(*runner_, GetParam().spec) {}

  std::unique_ptr<StageRunner> runner_;
  TestBucket bucket_;
};

// Gives random contents to all that a step reads, as in the middle of a run.
void randomize(TestBucket& bucket, uint64_t seed);

// The error allowed to a sum of many terms, as a multiple of the roundoff of the dtype of the sum.
// A useful order of summation has chains of at most a few hundred additions. Their errors are
// almost independent and grow like the square root of that number. Chance never gives four times
// as much.
constexpr double kSumTolerance = 64;

#define POWERSGD_INSTANTIATE_KERNEL_TEST(suite) \
  INSTANTIATE_TEST_SUITE_P(All, suite, ::testing::ValuesIn(kernel_cases()), case_name)

}  // namespace powersgd::test
