// SPDX-License-Identifier: BSD-3-Clause
//
// Each element of what reconstruct writes is a chain of std::fma in the order of k, bit for bit, on
// every instruction set.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <random>

#include "kernels/fixtures/kernel_test.h"

namespace powersgd::test {
namespace {

constexpr Part kPart{64, 1024, 2};

// Returns a number of magnitude 2^exponent to 2^(exponent + 1), of `digits` bits below the first.
float number(std::mt19937_64& random, int exponent, int digits) {
  const auto mantissa = static_cast<float>(random() % (uint64_t{1} << digits));
  const float value = std::ldexp(1 + std::ldexp(mantissa, -digits), exponent);
  return random() % 2 == 0 ? -value : value;
}

struct Factors {
  float p[2];
  float q[2];
};

float fused(const Factors& factors) {
  return std::fma(factors.p[1], factors.q[1], std::fma(factors.p[0], factors.q[0], 0.0f));
}

// Reconstructs a matrix of rank 2 on every instruction set, from rows of p and columns of q that
// `make` draws.
void expect_std_fma(const std::function<Factors(std::mt19937_64&)>& make) {
  std::mt19937_64 random(1);
  constexpr auto kRows = static_cast<size_t>(kPart.rows), kCols = static_cast<size_t>(kPart.cols);
  Values p(kRows * 2), q(kCols * 2), expected(kRows * kCols);
  std::vector<Factors> rows(kRows), cols(kCols);
  for (Factors& factors : rows) factors = make(random);
  for (Factors& factors : cols) factors = make(random);
  for (size_t i = 0; i < kRows; ++i) {
    for (size_t j = 0; j < kCols; ++j) {
      for (size_t k = 0; k < 2; ++k) p[2 * i + k] = rows[i].p[k], q[k * kCols + j] = cols[j].q[k];
      expected[i * kCols + j] = fused({{rows[i].p[0], rows[i].p[1]}, {cols[j].q[0], cols[j].q[1]}});
    }
  }
  for (const RunnerFactory& factory : stage_runners()) {
    const std::unique_ptr<StageRunner> runner = factory.make();
    DeviceBucket bucket(*runner, {{kPart}});
    bucket.matrices[0].p_hat->set(p);
    bucket.q_payload->set(q);
    bucket.bucket.output_scale = 1;
    bucket.run(Stage::kReconstruct);
    ASSERT_EQ(bucket.state().skipped, 0);
    EXPECT_EQ(bucket.gradient_of(bucket.matrices[0]), expected) << factory.name;
  }
}

TEST(MultiplyAdd, AnyMagnitudes) {
  expect_std_fma([](std::mt19937_64& random) {
    const int exponent = static_cast<int>(random() % 31) - 15;
    return Factors{{number(random, exponent, 23), number(random, 0, 23)},
                   {number(random, exponent, 23), number(random, 0, 23)}};
  });
}

// The second product is half way between two floats, or nearly so, and the first one, about a
// double's last bit or far below it, decides.
TEST(MultiplyAdd, Ties) {
  expect_std_fma([](std::mt19937_64& random) {
    const int exponent = -25 - static_cast<int>(random() % 25);
    return Factors{{number(random, exponent, 23), number(random, 0, 12)},
                   {number(random, exponent, 23), number(random, 0, 12)}};
  });
}

// The rounding error of the first product is what remains.
TEST(MultiplyAdd, Cancellation) {
  expect_std_fma([](std::mt19937_64& random) {
    const float p = number(random, 0, 23), q = number(random, 0, 23);
    return Factors{{p, p}, {q, -q}};
  });
}

TEST(MultiplyAdd, Subnormals) {
  expect_std_fma([](std::mt19937_64& random) {
    return Factors{{number(random, -70, 23), number(random, -70, 23)},
                   {number(random, -60, 23), number(random, -60, 23)}};
  });
}

// Some of the sums are infinite; the sum of two infinities of either sign does not occur.
TEST(MultiplyAdd, Overflow) {
  expect_std_fma([](std::mt19937_64& random) {
    return Factors{{number(random, 62, 23), number(random, 63, 23)},
                   {number(random, 62, 23), number(random, 63, 23)}};
  });
}

}  // namespace
}  // namespace powersgd::test
