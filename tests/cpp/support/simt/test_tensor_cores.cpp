// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels/cuda/tensor_cores.cuh"
#include "support/simt/simt.h"
#include "support/test_bucket.h"

// The fragments of the tensor cores, on the SIMT runtime's instructions.

namespace powersgd::test {
namespace {

using kernels::cuda::FragmentA;
using kernels::cuda::FragmentB;
using kernels::cuda::FragmentC;

struct Product {
  std::vector<float> a, b, c;  // 16 x inner, inner x 8, 16 x 8
};

std::vector<float> random_floats(int64_t count, uint64_t seed, double scale = 1) {
  const Values values = random_values(count, seed, scale);
  return {values.begin(), values.end()};
}

// c += a b, a warp at a time, eight inner indices after the others.
void multiply(Product& product, int inner) {
  simt::launch({1, 32, 0}, [&] {
    const int g = static_cast<int>(threadIdx.x) / 4, t = static_cast<int>(threadIdx.x) % 4;
    const auto at = [](std::vector<float>& values, int row, int column, int columns) -> float& {
      return values[static_cast<size_t>(row * columns + column)];
    };
    FragmentC c;
    for (int i = 0; i < 4; ++i) c[i] = at(product.c, g + i / 2 * 8, 2 * t + i % 2, 8);
    for (int k = 0; k < inner; k += 8) {
      FragmentA a;
      FragmentB b;
      for (int i = 0; i < 4; ++i) a.set(i, at(product.a, g + i % 2 * 8, k + t + i / 2 * 4, inner));
      for (int i = 0; i < 2; ++i) b.set(i, at(product.b, k + t + i * 4, g, 8));
      kernels::cuda::multiply_add(c, a, b);
    }
    for (int i = 0; i < 4; ++i) at(product.c, g + i / 2 * 8, 2 * t + i % 2, 8) = c[i];
  });
}

// An element of a b is off by 2^-21 of the magnitudes. Each of the `inner` / 8 additions rounds.
TEST(TensorCores, ProductIsAsAccurateAsFloat) {
  constexpr int kInner = 64;
  for (const double scale : {1e-9, 1.0, 1e12}) {
    Product product{random_floats(16 * kInner, 1, scale), random_floats(kInner * 8, 2),
                    random_floats(16 * 8, 3, scale)};
    const Product before = product;
    multiply(product, kInner);
    for (size_t row = 0; row < 16; ++row) {
      for (size_t column = 0; column < 8; ++column) {
        double exact = before.c[row * 8 + column], magnitude = std::fabs(exact);
        for (size_t k = 0; k < kInner; ++k) {
          const double term =
              static_cast<double>(before.a[row * kInner + k]) * before.b[k * 8 + column];
          exact += term;
          magnitude += std::fabs(term);
        }
        EXPECT_NEAR(product.c[row * 8 + column], exact,
                    (std::ldexp(1.0, -21) + kInner / 8 * std::ldexp(1.0, -24)) * magnitude);
      }
    }
  }
}

// Small integers need no rounding, and every element of each fragment is told from the others.
TEST(TensorCores, FragmentsLieAsTheInstructionSays) {
  Product product{std::vector<float>(16 * 8), std::vector<float>(8 * 8), random_floats(16 * 8, 4)};
  for (size_t row = 0; row < 16; ++row) product.a[row * 8 + (3 * row + 1) % 8] = 1 + row;
  for (size_t k = 0; k < 8; ++k) {
    for (size_t column = 0; column < 8; ++column) product.b[k * 8 + column] = 8 * k + column;
  }
  std::fill(product.c.begin(), product.c.end(), 0.5f);
  multiply(product, 8);
  for (size_t row = 0; row < 16; ++row) {
    for (size_t column = 0; column < 8; ++column)
      EXPECT_EQ(product.c[row * 8 + column],
                0.5f + static_cast<float>((1 + row) * (8 * ((3 * row + 1) % 8) + column)));
  }
}

float rounded(float value) {
  const uint32_t bits = kernels::cuda::round_to_tf32(value);
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

TEST(TensorCores, RoundsToTenBits) {
  const float unit = std::ldexp(1.0f, -10);
  for (const float sign : {1.0f, -1.0f}) {
    EXPECT_EQ(rounded(sign), sign);
    EXPECT_EQ(rounded(0 * sign), 0 * sign);
    EXPECT_EQ(rounded(sign * (1 + unit)), sign * (1 + unit));
    EXPECT_EQ(rounded(sign * (1 + unit / 2)), sign * (1 + unit));  // away from zero
    EXPECT_EQ(rounded(sign * (1 + unit * 3 / 2)), sign * (1 + 2 * unit));
    EXPECT_EQ(rounded(sign * std::nextafter(1 + unit / 2, 0.0f)), sign);
    EXPECT_EQ(rounded(sign * std::nextafter(2.0f, 0.0f)), sign * 2);
  }
}

TEST(TensorCores, LargestFloatStaysFinite) {
  Product product{std::vector<float>(16 * 8, std::numeric_limits<float>::max()),
                  std::vector<float>(8 * 8, 0.0f), std::vector<float>(16 * 8, 1.0f)};
  for (size_t column = 0; column < 8; ++column) product.b[column] = 0.25f;
  multiply(product, 8);
  for (const float value : product.c)
    EXPECT_NEAR(value / std::numeric_limits<float>::max(), 0.25, std::ldexp(1.0, -12));
}

}  // namespace
}  // namespace powersgd::test
