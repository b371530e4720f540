// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <vector>

#include "kernels/shared/philox.h"

namespace powersgd::kernels {
namespace {

std::vector<uint32_t> philox(const Philox4& counter, uint32_t key0, uint32_t key1) {
  const Philox4 result = philox4x32(counter, PhiloxKey(uint64_t{key1} << 32 | key0));
  return {result.word, result.word + 4};
}

// The known-answer vectors of Random123 (kat_vectors, philox4x32 with 10 rounds).
TEST(Philox, KnownAnswers) {
  EXPECT_EQ(philox({{0, 0, 0, 0}}, 0, 0),
            (std::vector<uint32_t>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox({{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}}, 0xffffffff, 0xffffffff),
            (std::vector<uint32_t>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox({{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}, 0xa4093822, 0x299f31d0),
            (std::vector<uint32_t>{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

// Mean 0 and variance 1/3, within five standard errors of the estimate.
TEST(Philox, MomentsOfRandomElement) {
  constexpr int kCount = 200000;
  double sum = 0;
  double squares = 0;
  for (int i = 0; i < kCount; ++i) {
    const double value = random_element(7, 3, 11, RandomUse::kStart, 2, static_cast<uint64_t>(i));
    ASSERT_GE(value, -2);
    ASSERT_LT(value, 2);
    ASSERT_EQ(value * (1 << 22), std::round(value * (1 << 22)));
    sum += value;
    squares += value * value;
  }
  EXPECT_NEAR(sum / kCount, 0, 5 * std::sqrt(1.0 / 3 / kCount));
  EXPECT_NEAR(squares / kCount, 1.0 / 3, 5 * std::sqrt(0.2 / kCount));
}

TEST(Philox, EveryArgumentMatters) {
  const auto sample = [](uint64_t seed, uint64_t random_id, uint64_t step, RandomUse use,
                         uint32_t column, uint64_t index) {
    std::vector<float> values;
    for (uint64_t i = 0; i < 4; ++i) {
      values.push_back(random_element(seed, random_id, step, use, column, index + i));
    }
    return values;
  };
  const std::set<std::vector<float>> samples = {
      sample(1, 1, 1, RandomUse::kStart, 1, 0),
      sample(2, 1, 1, RandomUse::kStart, 1, 0),
      sample(uint64_t{1} << 32 | 1, 1, 1, RandomUse::kStart, 1, 0),
      sample(1, 2, 1, RandomUse::kStart, 1, 0),
      sample(1, 1, 2, RandomUse::kStart, 1, 0),
      sample(1, 1, uint64_t{1} << 32 | 1, RandomUse::kStart, 1, 0),
      sample(1, 1, 1, RandomUse::kZeroRow, 1, 0),
      sample(1, 1, 1, RandomUse::kStart, 2, 0),
      sample(1, 1, 1, RandomUse::kStart, 1, 8),
      sample(1, 1, 1, RandomUse::kStart, 1, uint64_t{1} << 32),
  };
  EXPECT_EQ(samples.size(), 10u);
}

}  // namespace
}  // namespace powersgd::kernels
