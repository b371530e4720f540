// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "kernels/cuda/tensor_cores.cuh"
#include "kernels/fixtures/device_bucket.h"
#include "kernels/fixtures/dtypes.h"
#include "simt/simt.h"

// The fragments of the tensor cores, on the SIMT runtime's instructions.

namespace powersgd::test {
namespace {

using namespace kernels::cuda;

struct Product {
  Values a, b, c;  // 16x16, 16x8, 16x8
};

// c += a b, with the elements where the instruction wants them.
void multiply(Product& product) {
  simt::launch({1, 32, 0}, [&] {
    const auto g = static_cast<size_t>(lane_group()), t = static_cast<size_t>(lane_in_group());
    const auto pair_of = [](const Values& values, size_t at, size_t step) {
      return pack_bfloat16(static_cast<float>(values[at]), static_cast<float>(values[at + step]));
    };
    FragmentA a;
    FragmentB b;
    FragmentC c;
    for (size_t i = 0; i < 4; ++i)
      a[i] = pair_of(product.a, (g + i % 2 * 8) * 16 + 2 * t + i / 2 * 8, 1);
    for (size_t i = 0; i < 2; ++i) b[i] = pair_of(product.b, (2 * t + i * 8) * 8 + g, 8);
    const auto place = [&](size_t i) { return (g + i / 2 * 8) * 8 + 2 * t + i % 2; };
    for (size_t i = 0; i < 4; ++i) c[i] = static_cast<float>(product.c[place(i)]);
    mma(c, a, b);
    for (size_t i = 0; i < 4; ++i) product.c[place(i)] = c[i];
  });
}

// The operands are rounded to nearest, and the sum is that of a float. Every element of each
// fragment is told from the others.
TEST(TensorCores, ProductIsThatOfTheRoundedOperands) {
  for (const double scale : {1e-9, 1.0, 1e12}) {
    Product product{random_values(16 * 16, 1, scale), random_values(16 * 8, 2),
                    random_values(16 * 8, 3, scale)};
    const auto rounded = [](const Values& values) {
      return decode(DType::kBFloat16, encode(DType::kBFloat16, values));
    };
    const Product before{rounded(product.a), rounded(product.b), product.c};
    multiply(product);
    for (size_t row = 0; row < 16; ++row) {
      for (size_t column = 0; column < 8; ++column) {
        double exact = before.c[row * 8 + column], magnitude = std::fabs(exact);
        for (size_t k = 0; k < 16; ++k) {
          const double term = before.a[row * 16 + k] * before.b[k * 8 + column];
          exact += term;
          magnitude += std::fabs(term);
        }
        EXPECT_NEAR(product.c[row * 8 + column], exact, std::ldexp(1.0, -23) * magnitude);
      }
    }
  }
}

TEST(TensorCores, LargestFloatStaysFinite) {
  Product product{Values(16 * 16, std::numeric_limits<float>::max()), Values(16 * 8),
                  Values(16 * 8, 1)};
  for (size_t column = 0; column < 8; ++column) product.b[column] = 0.25;
  multiply(product);
  for (const double value : product.c)
    EXPECT_NEAR(value / std::numeric_limits<float>::max(), 0.25, std::ldexp(1.0, -9));
}

}  // namespace
}  // namespace powersgd::test
