// SPDX-License-Identifier: BSD-3-Clause
//
// test_project.cpp tests the part of project_transposed that is the same in project.
#include <gtest/gtest.h>

#include "support/dtypes.h"
#include "support/kernel_test.h"
#include "support/reference.h"

namespace powersgd::test {
namespace {

class ProjectTransposed : public KernelTest {
 protected:
  double roundoff() const { return unit_roundoff(bucket_.spec.factor_dtype()); }

  void expect_q_of_memory(const TestBucket& bucket) {
    for (const DeviceMatrix& matrix : bucket.matrices) {
      expect_close(bucket.q_of(matrix),
                   reference_q(matrix.part, matrix.memory->get(), matrix.p_hat->get()),
                   kSumTolerance * roundoff());
    }
  }
};

// The reduced activities and the verdict are still those of the last step.
TEST_P(ProjectTransposed, IgnoresTheLastStep) {
  BucketSpec spec = GetParam().spec;
  spec.tells_activity = true;
  TestBucket bucket(*runner_, spec);
  randomize(bucket, 1);
  bucket.set_activities(Values(bucket.matrices.size()));
  const kernels::Verdict skipped{1};
  runner_->copy_in(bucket.bucket.verdict, &skipped, sizeof(skipped));
  bucket.run(Stage::kProjectTransposed);
  expect_q_of_memory(bucket);
}

// The last step's product may be made of one pair of factors, and q of another. With the same pair,
// project and back_project must give the same.
TEST_P(ProjectTransposed, IsProjectAndBackProject) {
  randomize(bucket_, 2);
  std::vector<Values> memory, q;
  for (const DeviceMatrix& matrix : bucket_.matrices) {
    matrix.q_local->set(matrix.q_warm->get());
    memory.push_back(matrix.memory->get());
  }
  bucket_.run(Stage::kProject);
  bucket_.run(Stage::kBackProject);
  for (size_t i = 0; i < memory.size(); ++i) {
    const DeviceMatrix& matrix = bucket_.matrices[i];
    q.push_back(bucket_.q_of(matrix));
    matrix.memory->set(memory[i]);
    matrix.p_local->set(matrix.p_hat->get());
  }
  bucket_.run(Stage::kProjectTransposed);
  expect_q_of_memory(bucket_);
  // M is rounded in two orders of summation, and so q differs.
  const double rounding = unit_roundoff(bucket_.bucket.residual_dtype);
  for (size_t i = 0; i < q.size(); ++i) {
    const DeviceMatrix& matrix = bucket_.matrices[i];
    Checked expected = reference_q(matrix.part, matrix.memory->get(), matrix.p_hat->get());
    expected.value = q[i];
    expect_close(bucket_.q_of(matrix), expected, 2 * kSumTolerance * roundoff() + 8 * rounding);
  }
}

POWERSGD_INSTANTIATE_KERNEL_TEST(ProjectTransposed);

}  // namespace
}  // namespace powersgd::test
