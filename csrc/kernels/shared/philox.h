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

// The use of a number is a part of the counter, so that no two uses ever share a number.
enum class RandomUse : uint32_t { kStart = 0, kDeadColumn = 1 };

struct Philox4 {
  uint32_t word[4];
};

POWERSGD_HOST_DEVICE inline Philox4 philox4x32(Philox4 counter, uint32_t key0, uint32_t key1) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53u} * counter.word[0];
    const uint64_t product1 = uint64_t{0xCD9E8D57u} * counter.word[2];
    counter = {{static_cast<uint32_t>(product1 >> 32) ^ counter.word[1] ^ key0,
                static_cast<uint32_t>(product1),
                static_cast<uint32_t>(product0 >> 32) ^ counter.word[3] ^ key1,
                static_cast<uint32_t>(product0)}};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
}

// Element `index` of random column `column` of matrix `random_id`: near-normal, mean 0, variance
// 1/3. It is a sum of four 22-bit uniforms (Irwin-Hall), which takes integer arithmetic only and is
// exact everywhere. Box-Muller would depend on each platform's log and cos. Every value is a
// multiple of 2^-22 in [-2, 2), exactly representable in float.
POWERSGD_HOST_DEVICE inline float random_element(uint64_t seed, uint64_t random_id, uint64_t step,
                                                 RandomUse use, uint32_t column, uint64_t index) {
  const uint32_t step32 = static_cast<uint32_t>(step ^ (step >> 32));
  const Philox4 bits = philox4x32(
      {{static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32) << 16 | (column & 0xFFFFu),
        step32 << 1 | static_cast<uint32_t>(use), static_cast<uint32_t>(random_id)}},
      static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
  int32_t sum = 0;
  for (int i = 0; i < 4; ++i) sum += static_cast<int32_t>(bits.word[i] >> 10);
  return static_cast<float>(sum - (1 << 23)) * (1.0f / (1 << 22));
}

}  // namespace powersgd::kernels
