// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/cpu/simd/convert.h"
#include "kernels/shared/warm_start_noise.h"

// A row of q_warm with noise. All ranks must get the same bits: integers, and products and sums
// that are never fused.
namespace powersgd::kernels::cpu::POWERSGD_TARGET {

// Writes the noise of a group of columns. Every loop over lanes becomes vectors.
POWERSGD_TILE_FUNCTION inline void make_noise(const Philox4& first, uint64_t seed, float amplitude,
                                              float (&noise)[kNoiseColumns]) {
  alignas(64) uint32_t words[4][kNoiseLanes];
  for (uint32_t lane = 0; lane < kNoiseLanes; ++lane) {
    words[0][lane] = first.word[0] + lane;
    for (int i = 1; i < 4; ++i) words[i][lane] = first.word[i];
  }
  PhiloxKey key(seed);
  for (int round = 0; round < kPhiloxRounds; ++round, key.advance()) {
    for (int lane = 0; lane < kNoiseLanes; ++lane) {
      const Philox4 next =
          philox_round({{words[0][lane], words[1][lane], words[2][lane], words[3][lane]}}, key);
      for (int i = 0; i < 4; ++i) words[i][lane] = next.word[i];
    }
  }
  for (int i = 0; i < 4; ++i) {
    for (int lane = 0; lane < kNoiseLanes; ++lane) {
      noise[i * kNoiseLanes + lane] = noise_element(words[i][lane], amplitude);
    }
  }
}

// q_warm = scale * (row k of Q) + noise.
template <class F>
POWERSGD_TILE_FUNCTION inline void write_noisy_row(const Bucket& bucket, const Matrix& matrix,
                                                   int64_t k, const F* row, double scale,
                                                   F* q_warm) {
  constexpr int64_t kLane = kLanes<double>;
  const float amplitude = noise_amplitude(bucket, matrix);
  for (int64_t begin = 0; begin < matrix.cols; begin += kNoiseColumns) {
    alignas(64) float noise[kNoiseColumns];
    make_noise(first_noise_counter(bucket, matrix.random_id, k, begin), bucket.seed, amplitude,
               noise);
    const int64_t count = std::min<int64_t>(kNoiseColumns, matrix.cols - begin);
    const F* source = row + begin;
    F* target = q_warm + begin;
    int64_t j = 0;
    for (; j + kLane <= count; j += kLane) {
      store_double(target + j, load_double(source + j) * scale + load_double(noise + j));
    }
    for (; j < count; ++j) target[j] = static_cast<F>(source[j] * scale + noise[j]);
  }
}

}  // namespace powersgd::kernels::cpu::POWERSGD_TARGET
