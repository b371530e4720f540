// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <cmath>

#include "kernels/fixtures/dtypes.h"
#include "kernels/fixtures/kernel_test.h"
#include "kernels/fixtures/reference.h"

namespace powersgd::test {
namespace {

class BackProject : public KernelTest {
 protected:
  void expect_q(const DeviceBucket& bucket, const DeviceMatrix& matrix, const Values& m) const {
    const BucketSpec& spec = bucket.spec;
    expect_close(bucket.q_of(matrix),
                 reference_q(matrix.part, spec.operand(m), spec.operand(matrix.p_hat->get())),
                 kSumTolerance * roundoff());
  }
};

// q goes to the payload and to the local copy, and nothing else is written.
TEST_P(BackProject, MatchesTheReference) {
  randomize(bucket_, 1);
  const Values gradient = bucket_.gradient->get();
  std::vector<Values> before;
  for (const DeviceMatrix& matrix : bucket_.matrices) before.push_back(matrix.memory->get());
  bucket_.run(Stage::kBackProject);
  for (size_t i = 0; i < before.size(); ++i) {
    const DeviceMatrix& matrix = bucket_.matrices[i];
    expect_q(bucket_, matrix, before[i]);
    EXPECT_EQ(bucket_.q_of(matrix), matrix.q_local->get());
    EXPECT_EQ(matrix.memory->get(), before[i]);
  }
  EXPECT_EQ(bucket_.gradient->get(), gradient);
}

TEST_P(BackProject, WithoutErrorFeedbackReadsTheGradient) {
  BucketSpec spec = GetParam().spec;
  spec.error_feedback = false;
  DeviceBucket bucket(*runner_, spec);
  randomize(bucket, 3);
  Values gradient = bucket.gradient->get();
  for (size_t i = 0; i < gradient.size(); i += 97) {
    gradient[i] = i % 2 == 0 ? kNaN : -kInfinity;
  }
  bucket.gradient->set(gradient);
  bucket.run(Stage::kBackProject);
  for (const DeviceMatrix& matrix : bucket.matrices) {
    expect_q(bucket, matrix, finite(bucket.gradient_of(matrix)));
  }
}

TEST_P(BackProject, SkippedStepSendsZeros) {
  randomize(bucket_, 4);
  bucket_.set_skipped(true);
  bucket_.run(Stage::kBackProject);
  for (const DeviceMatrix& matrix : bucket_.matrices) {
    const Values zeros(static_cast<size_t>(matrix.part.rank * matrix.part.cols));
    EXPECT_EQ(bucket_.q_of(matrix), zeros);
    EXPECT_EQ(matrix.q_local->get(), zeros);
  }
}

// The residual of a matrix stays in memory while no rank has a gradient of it. The gradient of this
// rank alone decides nothing.
TEST_P(BackProject, MatrixOutOfUseSendsZeros) {
  BucketSpec spec = GetParam().spec;
  spec.tells_use = true;
  DeviceBucket bucket(*runner_, spec);
  const size_t count = bucket.matrices.size();
  for (size_t idle = 0; idle <= count; ++idle) {
    randomize(bucket, 6);
    bucket.gradient->set(Values(bucket.gradient->get().size()));
    Values reduced(count, 1);
    for (size_t i = 0; i < count; i += 2) reduced[i] = 3;  // ranks
    if (idle < count) reduced[idle] = 0;
    bucket.set_uses(reduced);
    bucket.q_payload->set(random_values(bucket.bucket.q_numel, 7));
    bucket.run(Stage::kBackProject);
    for (size_t i = 0; i < count; ++i) {
      const DeviceMatrix& matrix = bucket.matrices[i];
      EXPECT_EQ(bucket.q_of(matrix), matrix.q_local->get());
      if (i == idle) {
        EXPECT_EQ(bucket.q_of(matrix), Values(bucket.q_of(matrix).size())) << "matrix " << i;
      } else {
        expect_q(bucket, matrix, matrix.memory->get());
      }
    }
  }
}

// More rows than the ranges of a strip are made for. Those of bfloat16 products then have more than
// a block takes of p_hat at a time.
TEST(BackProjectOfManyRows, MatchesTheReference) {
  for (const int64_t rank : {2, 9}) {
    const Part part{33000, 5, rank};
    BucketSpec spec{{part}};
    spec.bfloat16_products = rank == 9 && !run_cpu_kernels();
    for (const RunnerFactory& factory : stage_runners()) {
      const auto runner = factory.make();
      DeviceBucket bucket(*runner, spec);
      randomize(bucket, 1);
      bucket.run(Stage::kBackProject);
      const DeviceMatrix& matrix = bucket.matrices.front();
      expect_close(
          bucket.q_of(matrix),
          reference_q(part, spec.operand(matrix.memory->get()), spec.operand(matrix.p_hat->get())),
          kSumTolerance * unit_roundoff(DType::kFloat32));
    }
  }
}

POWERSGD_INSTANTIATE(BackProject, bucket_specs());

}  // namespace
}  // namespace powersgd::test
