// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "kernels/fixtures/dtypes.h"
#include "kernels/fixtures/kernel_test.h"
#include "kernels/fixtures/reference.h"

namespace powersgd::test {
namespace {

// The arrays of a matrix before the stage.
struct Before {
  explicit Before(const DeviceMatrix& matrix)
      : memory(matrix.memory ? matrix.memory->get()
                             : Values(static_cast<size_t>(matrix.part.numel()))),
        p_hat(matrix.p_hat->get()),
        q_local(matrix.q_local->get()),
        q_warm(matrix.q_warm->get()),
        memory_units(matrix.memory_units->get().front()) {}

  Values memory, p_hat, q_local, q_warm;
  double memory_units;
};

class Project : public KernelTest {
 protected:
  // Runs the stage on a gradient of this loss scale, and compares all that it writes.
  void run_and_check(double expected_count = 0, double loss_scale = 1) {
    const std::vector<Before> before(bucket_.matrices.begin(), bucket_.matrices.end());
    const Values gradient = bucket_.gradient->get();
    bucket_.p_payload->set(Values(static_cast<size_t>(bucket_.bucket.p_numel), 7));
    bucket_.run(Stage::kProject);
    for (size_t i = 0; i < before.size(); ++i)
      check_matrix(bucket_.matrices[i], before[i], loss_scale);
    for (const DeviceRaw& raw : bucket_.raws) check_raw(raw, gradient);
    EXPECT_EQ(bucket_.gradient->bytes(), encode(bucket_.spec.gradient_dtype, gradient));
    EXPECT_EQ(bucket_.count(), expected_count);
  }

  void check_matrix(const DeviceMatrix& matrix, const Before& before, double loss_scale) {
    const Part& part = matrix.part;
    const Values gradient = bucket_.gradient_of(matrix);
    Checked m = reference_m(part, gradient, before.memory, before.p_hat, before.q_local,
                            loss_scale / before.memory_units);
    if (matrix.memory) {
      // The product is a chain of `rank` additions, and four operations follow. Then M is rounded
      // to the residual dtype.
      const DType residual = bucket_.bucket.residual_dtype;
      const auto operations = static_cast<double>(part.rank + 4);
      expect_close(matrix.memory->get(), m, operations * roundoff() + unit_roundoff(residual));
      m.value = matrix.memory->get();
    } else {
      m.value = finite(gradient);
    }
    // P is that of M as it was stored.
    const BucketSpec& spec = bucket_.spec;
    expect_close(bucket_.p_of(matrix),
                 reference_p(part, spec.operand(m.value), spec.operand(before.q_warm)),
                 kSumTolerance * roundoff());
    EXPECT_EQ(matrix.q_local->get(), before.q_local);
    EXPECT_EQ(matrix.p_hat->get(), before.p_hat);
    EXPECT_EQ(matrix.q_warm->get(), before.q_warm);
    EXPECT_EQ(matrix.memory_units->get().front(), loss_scale);
  }

  // Raw segments travel exactly: float holds every value of the gradient dtype.
  void check_raw(const DeviceRaw& raw, const Values& gradient) {
    const Values sent = DeviceBucket::slice(bucket_.p_payload->get(), raw.p_offset, raw.numel);
    const Values expected = DeviceBucket::slice(gradient, raw.gradient_offset, raw.numel);
    for (size_t i = 0; i < sent.size(); ++i) {
      if (!std::isfinite(expected[i])) continue;
      ASSERT_EQ(sent[i], expected[i]);
    }
  }

  static void put(DeviceArray& array, int64_t index, double value) {
    Values values = array.get();
    values[static_cast<size_t>(index)] = value;
    array.set(values);
  }

  void put_in_gradient(int64_t index, double value) { put(*bucket_.gradient, index, value); }

  // Memory is `value` everywhere, and there is no last step.
  void start_with_memory(double value) {
    for (DeviceMatrix& matrix : bucket_.matrices) {
      matrix.memory->set(Values(matrix.memory->get().size(), value));
      matrix.q_local->set(Values(matrix.q_local->get().size()));
    }
  }
};

// Each matrix has its residual in units of its own.
TEST_P(Project, MatchesTheReference) {
  for (const bool on_device : {false, true}) {
    randomize(bucket_, 2);
    double units = 8;
    for (DeviceMatrix& matrix : bucket_.matrices) matrix.memory_units->set({units /= 2});
    bucket_.bucket.units = on_device ? 2 : 0.375;
    if (on_device) bucket_.put_loss_scale(0.1875);
    run_and_check(0, 0.375);
  }
}

// At a loss scale of 0 the gradient is 0 too. Nothing may become 0 / 0, which memory would keep.
TEST_P(Project, StaysFiniteAfterALossScaleOfZero) {
  randomize(bucket_, 2);
  for (const double scale : {0.0, 0.0, 2.0}) {
    bucket_.bucket.units = scale;
    bucket_.run(Stage::kProject);
    for (const DeviceMatrix& matrix : bucket_.matrices) {
      if (!matrix.memory) continue;
      for (const double m : matrix.memory->get()) ASSERT_TRUE(std::isfinite(m)) << scale;
    }
  }
}

TEST_P(Project, NonFiniteElementCountsAsZero) {
  for (const DeviceMatrix& matrix : bucket_.matrices) {
    const int64_t numel = matrix.part.numel();
    if (numel == 0) continue;
    for (const auto& [value, index] :
         {std::pair{-kInfinity, int64_t{0}}, std::pair{kNaN, numel - 1}}) {
      randomize(bucket_, 4);
      put_in_gradient(matrix.gradient_offset + index, value);
      SCOPED_TRACE(std::to_string(value) + " at " + std::to_string(index));
      run_and_check(1);
    }
  }
}

TEST_P(Project, NonFiniteRawElementIsCounted) {
  for (const DeviceRaw& raw : bucket_.raws) {
    if (raw.numel == 0) continue;
    for (const auto& [value, index] :
         {std::pair{kInfinity, int64_t{0}}, std::pair{kNaN, raw.numel - 1}}) {
      randomize(bucket_, 5);
      put_in_gradient(raw.gradient_offset + index, value);
      SCOPED_TRACE(std::to_string(value) + " at " + std::to_string(index));
      run_and_check(1);
    }
  }
}

// A sum beyond the largest value of the residual dtype must not become an infinity, which would
// stay.
TEST_P(Project, MemoryStaysFinite) {
  randomize(bucket_, 6);
  start_with_memory(largest(bucket_.bucket.residual_dtype));
  Values gradient = bucket_.gradient->get();
  for (double& g : gradient) g = largest(bucket_.spec.gradient_dtype);
  bucket_.gradient->set(gradient);
  bucket_.run(Stage::kProject);
  for (const DeviceMatrix& matrix : bucket_.matrices) {
    for (const double m : matrix.memory->get()) ASSERT_TRUE(std::isfinite(m));
  }
}

TEST_P(Project, WithoutErrorFeedback) {
  BucketSpec spec = GetParam().spec;
  spec.error_feedback = false;
  DeviceBucket bucket(*runner_, spec);
  randomize(bucket, 7);
  for (const double value : {1.0, kNaN}) {
    Values gradient = bucket.gradient->get();
    if (bucket.matrices.empty() || gradient.empty()) continue;
    const DeviceMatrix& last = bucket.matrices.back();
    gradient[static_cast<size_t>(last.gradient_offset + last.part.numel() - 1)] = value;
    bucket.gradient->set(gradient);
    bucket.run(Stage::kProject);
    EXPECT_EQ(bucket.count(), std::isfinite(value) ? 0 : 1);
    for (const DeviceMatrix& matrix : bucket.matrices) {
      const Values m = finite(bucket.gradient_of(matrix));
      expect_close(bucket.p_of(matrix),
                   reference_p(matrix.part, spec.operand(m), spec.operand(matrix.q_warm->get())),
                   kSumTolerance * roundoff());
    }
  }
}

class ProjectUse : public KernelTest {
 protected:
  // The uses that project tells of a bucket whose gradient is zero in every other matrix.
  Values uses_after_project(DeviceBucket& bucket) {
    randomize(bucket, 8);
    Values gradient = bucket.gradient->get();
    for (size_t i = 0; i < bucket.matrices.size(); i += 2) {
      const DeviceMatrix& matrix = bucket.matrices[i];
      const auto begin = gradient.begin() + matrix.gradient_offset;
      std::fill(begin, begin + matrix.part.numel(), 0);
    }
    bucket.gradient->set(gradient);
    bucket.set_uses(Values(bucket.matrices.size(), 7));
    bucket.run(Stage::kProject);
    return bucket.uses();
  }

  BucketSpec telling() const {
    BucketSpec spec = GetParam().spec;
    spec.tells_use = true;
    return spec;
  }
};

// A gradient of zeros is one like any other.
TEST_P(ProjectUse, IsThatOfTheCallerWhateverTheGradientHolds) {
  BucketSpec spec = telling();
  for (const bool error_feedback : {true, false}) {
    spec.error_feedback = error_feedback;
    DeviceBucket bucket(*runner_, spec);
    const size_t count = bucket.matrices.size();
    EXPECT_EQ(uses_after_project(bucket), Values(count, 1));
    for (size_t unused = 0; unused < count; ++unused) {
      std::vector<int32_t> used(count, 1);
      used[unused] = 0;
      bucket.put_used(used);
      EXPECT_EQ(uses_after_project(bucket), Values(used.begin(), used.end()));
    }
  }
}

POWERSGD_INSTANTIATE(ProjectUse, bucket_specs());
POWERSGD_INSTANTIATE(Project, bucket_specs());

}  // namespace
}  // namespace powersgd::test
