// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>

#include "kernels/shared/host_device.h"

// Counter-based random numbers. They have the same bits on the CPU and on CUDA, on every rank and
// in any order of evaluation, and leave torch's generators alone.
//
// Philox4x32-10: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC
// 2011).

namespace powersgd::kernels {

// The use of a number is a part of the counter, so no two uses ever share a number.
enum class RandomUse : uint32_t { kStart = 0, kZeroRow = 1 };

struct Philox4 {
  uint32_t word[4];
};

constexpr int kPhiloxRounds = 10;

// The keys of the next round follow from those of this one.
struct PhiloxKey {
  uint32_t word[2];

  POWERSGD_HOST_DEVICE explicit PhiloxKey(uint64_t seed)
      : word{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)} {}
  POWERSGD_HOST_DEVICE void advance() {
    word[0] += 0x9E3779B9u;
    word[1] += 0xBB67AE85u;
  }
};

POWERSGD_HOST_DEVICE inline Philox4 philox_round(const Philox4& counter, const PhiloxKey& key) {
  const uint64_t product0 = uint64_t{0xD2511F53u} * counter.word[0];
  const uint64_t product1 = uint64_t{0xCD9E8D57u} * counter.word[2];
  return {{static_cast<uint32_t>(product1 >> 32) ^ counter.word[1] ^ key.word[0],
           static_cast<uint32_t>(product1),
           static_cast<uint32_t>(product0 >> 32) ^ counter.word[3] ^ key.word[1],
           static_cast<uint32_t>(product0)}};
}

POWERSGD_HOST_DEVICE inline Philox4 philox4x32(Philox4 counter, PhiloxKey key) {
  for (int round = 0; round < kPhiloxRounds; ++round, key.advance()) {
    counter = philox_round(counter, key);
  }
  return counter;
}

// The counter of an index below 2^47.
POWERSGD_HOST_DEVICE inline Philox4 random_counter(uint64_t random_id, uint64_t step, RandomUse use,
                                                   uint32_t column, uint64_t index) {
  const uint32_t step32 = static_cast<uint32_t>(step ^ (step >> 32));
  const uint32_t use32 = static_cast<uint32_t>(use);
  return {{static_cast<uint32_t>(index),
           use32 >> 1 << 31 | static_cast<uint32_t>(index >> 32) << 16 | (column & 0xFFFFu),
           step32 << 1 | (use32 & 1u), static_cast<uint32_t>(random_id)}};
}

// Element `index` of random column `column` of matrix `random_id`: near-normal, mean 0, variance
// 1/3. It is a sum of four 22-bit uniforms (Irwin-Hall), which takes integer arithmetic only and is
// exact everywhere. Box-Muller would depend on each platform's log and cos. Every value is a
// multiple of 2^-22 in [-2, 2), exactly representable in float.
POWERSGD_HOST_DEVICE inline float random_element(uint64_t seed, uint64_t random_id, uint64_t step,
                                                 RandomUse use, uint32_t column, uint64_t index) {
  const Philox4 bits =
      philox4x32(random_counter(random_id, step, use, column, index), PhiloxKey(seed));
  int32_t sum = 0;
  for (int i = 0; i < 4; ++i) sum += static_cast<int32_t>(bits.word[i] >> 10);
  return static_cast<float>(sum - (1 << 23)) * (1.0f / (1 << 22));
}

}  // namespace powersgd::kernels
