// SPDX-License-Identifier: BSD-3-Clause
//
// multiply_add of floats is std::fma on every instruction set, bit for bit.
#include "kernels/cpu/simd/fused.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <random>
#include <vector>

namespace powersgd::kernels::cpu {
namespace {

struct Factors {
  float a, b, c;
};

// Whole vectors of any Arch.
struct MultiplyAdd {
  const std::vector<float>&a, &b, &c;
  std::vector<float>& result;

  template <class Arch>
  POWERSGD_INLINE void run() const {
    for (size_t j = 0; j < a.size(); j += kLanes<Arch, float>) {
      store<Arch>(&result[j],
                  multiply_add<Arch>(load<Arch>(&a[j]), load<Arch>(&b[j]), load<Arch>(&c[j])));
    }
  }
};

// `make` gives factors for a random 64-bit word.
void expect_std_fma(const std::function<Factors(uint64_t)>& make) {
  constexpr size_t kCount = size_t{1} << 16;
  std::mt19937_64 random(1);
  std::vector<float> a(kCount), b(kCount), c(kCount), result(kCount);
  for (size_t i = 0; i < kCount; ++i) {
    const Factors factors = make(random());
    a[i] = factors.a, b[i] = factors.b, c[i] = factors.c;
  }
  for (const Isa isa : {Isa::kBaseline, Isa::kAvx2, Isa::kAvx512}) {
    if (!is_supported(isa)) continue;
    run_on(isa, MultiplyAdd{a, b, c, result});
    int wrong = 0;
    for (size_t i = 0; i < kCount; ++i) {
      const float expected = std::fma(a[i], b[i], c[i]);
      const bool same =
          std::isnan(expected) ? std::isnan(result[i]) : std::memcmp(&expected, &result[i], 4) == 0;
      if (!same && wrong++ < 3) {
        ADD_FAILURE() << std::hexfloat << "fma(" << a[i] << ", " << b[i] << ", " << c[i]
                      << ") = " << expected << ", but " << result[i] << " on instruction set "
                      << static_cast<int>(isa);
      }
    }
    EXPECT_EQ(wrong, 0);
  }
}

float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Another random word.
uint64_t mixed(uint64_t random) {
  const uint64_t product = random * 0x9E3779B97F4A7C15u;
  return product << 32 | product >> 32;
}

TEST(Fused, AnyBits) {
  expect_std_fma([](uint64_t random) {
    return Factors{from_bits(static_cast<uint32_t>(random)),
                   from_bits(static_cast<uint32_t>(random >> 32)),
                   from_bits(static_cast<uint32_t>(mixed(random)))};
  });
}

}  // namespace
}  // namespace powersgd::kernels::cpu
