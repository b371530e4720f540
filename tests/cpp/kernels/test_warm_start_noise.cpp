// SPDX-License-Identifier: BSD-3-Clause
//
// The noise of the warm start, whose mechanism is a part of reconstruct.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <vector>

#include "kernels/fixtures/dtypes.h"
#include "kernels/fixtures/kernel_test.h"
#include "kernels/fixtures/reference.h"
#include "kernels/shared/philox.h"

namespace powersgd::test {
namespace {

constexpr uint64_t kStep = (uint64_t{1} << 32) + 77;

// Noise of standard deviation 1, by its definition: a sum of four bytes, brought to mean 0 and
// variance 1. A group of 128 columns has 32 counters.
double reference_noise(uint64_t seed, uint64_t random_id, uint64_t step, int64_t row, int64_t col) {
  const auto counter = static_cast<uint32_t>(col / 128 * 32 + col % 32);
  const auto step32 = static_cast<uint32_t>(step ^ (step >> 32));
  const kernels::Philox4 bits =
      kernels::philox4x32({{counter, 1u << 31 | static_cast<uint32_t>(row), step32 << 1,
                            static_cast<uint32_t>(random_id)}},
                          kernels::PhiloxKey(seed));
  const uint32_t word = bits.word[col % 128 / 32];
  double sum = 0;
  for (int byte = 0; byte < 4; ++byte) sum += word >> (8 * byte) & 0xFFu;
  return (sum - 4 * 127.5) / std::sqrt(4 * 65535.0 / 12);
}

class WarmStartNoise : public KernelTest {};

TEST_P(WarmStartNoise, MatchesTheReference) {
  for (const double sigma : {0.05, 3.0}) {
    randomize(bucket_, 1);
    bucket_.q_payload->set(random_values(bucket_.bucket.q_numel, 2));
    bucket_.set_step(kStep);
    bucket_.bucket.warm_start_noise = sigma;
    bucket_.run(Stage::kReconstruct);
    uint64_t random_id = 100;
    for (const DeviceMatrix& matrix : bucket_.matrices) {
      const auto [rows, cols, rank] =
          std::tuple(matrix.part.rows, matrix.part.cols, matrix.part.rank);
      const Values q = bucket_.q_of(matrix);
      Checked expected{Values(q.size()), Values(q.size())};
      for (int64_t k = 0; k < rank; ++k) {
        const double length = norm(DeviceBucket::slice(q, k * cols, cols));
        for (int64_t j = 0; j < cols; ++j) {
          const auto i = static_cast<size_t>(k * cols + j);
          const double noise = sigma / std::sqrt(static_cast<double>(cols)) *
                               reference_noise(bucket_.bucket.seed, random_id, kStep, k, j);
          expected.value[i] = q[i] / length + noise;
          // The noise is of float, whatever the factors are.
          expected.magnitude[i] = std::fabs(q[i] / length) +
                                  unit_roundoff(DType::kFloat32) / roundoff() * std::fabs(noise);
        }
      }
      expect_close(matrix.q_warm->get(), expected, 4 * roundoff());
      ++random_id;
    }
  }
}

POWERSGD_INSTANTIATE(WarmStartNoise, bucket_specs());

constexpr double kSigma = 0.2;
constexpr int64_t kCols = 4096;
constexpr int64_t kRank = 4;

// Returns the rows of the noise of one step, brought to standard deviation 1.
std::vector<Values> noise_of_step(StageRunner& runner, uint64_t seed, uint64_t step) {
  DeviceBucket bucket(runner, {{{8, kCols, kRank}, {8, kCols, kRank}}});
  bucket.bucket.seed = seed;
  bucket.q_payload->set(random_values(bucket.bucket.q_numel, 3));
  bucket.set_step(step);
  std::vector<Values> plain, rows;
  for (const double sigma : {0.0, kSigma}) {
    bucket.bucket.warm_start_noise = sigma;
    bucket.run(Stage::kReconstruct);
    for (const DeviceMatrix& matrix : bucket.matrices) {
      for (int64_t k = 0; k < kRank; ++k) {
        (sigma == 0 ? plain : rows)
            .push_back(DeviceBucket::slice(matrix.q_warm->get(), k * kCols, kCols));
      }
    }
  }
  const double scale = std::sqrt(static_cast<double>(kCols)) / kSigma;
  for (size_t i = 0; i < rows.size(); ++i) {
    for (size_t j = 0; j < rows[i].size(); ++j) {
      rows[i][j] = scale * (rows[i][j] - plain[i][j]);
    }
  }
  return rows;
}

double mean_product(const Values& a, const Values& b) {
  return std::inner_product(a.begin(), a.end(), b.begin(), 0.0) / static_cast<double>(kCols);
}

// Rows of two matrices, steps and seeds, and the random start, within five standard errors. The
// numbers are the same in each run, so that a test that passes once passes always.
TEST(WarmStartNoiseStatistics, RowsAreIndependentWithMean0AndVariance1) {
  const double error = 5 / std::sqrt(static_cast<double>(kCols));
  for (const RunnerFactory& factory : stage_runners()) {
    const std::unique_ptr<StageRunner> runner = factory.make();
    std::vector<Values> rows;
    for (const auto& [seed, step] : {std::pair{1, 5}, {1, 6}, {2, 5}}) {
      for (Values& row : noise_of_step(*runner, seed, step)) rows.push_back(std::move(row));
    }
    DeviceBucket start(*runner, {{{8, kCols, kRank}}});
    start.bucket.seed = 1;
    start.set_step(5);
    start.run(Stage::kRandomStart);
    for (int64_t k = 0; k < kRank; ++k) {
      rows.push_back(DeviceBucket::slice(start.matrices[0].q_warm->get(), k * kCols, kCols));
      for (double& value : rows.back()) value *= std::sqrt(3.0);
    }
    const Values ones(static_cast<size_t>(kCols), 1);
    for (size_t i = 0; i < rows.size(); ++i) {
      EXPECT_NEAR(mean_product(rows[i], ones), 0, error) << factory.name << " row " << i;
      // The square of a sum of four uniform numbers has the variance 1.7.
      EXPECT_NEAR(mean_product(rows[i], rows[i]), 1, std::sqrt(1.7) * error) << factory.name;
      for (size_t other = 0; other < i; ++other) {
        EXPECT_NEAR(mean_product(rows[i], rows[other]), 0, error)
            << factory.name << " rows " << i << " and " << other;
      }
    }
  }
}

}  // namespace
}  // namespace powersgd::test
