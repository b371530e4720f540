// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/shared/host_device.h"
#include "kernels/shared/philox.h"
#include "powersgd/kernels.h"

// The noise that reconstruct adds to the unit rows of q_warm: mean 0, standard deviation
// warm_start_noise / sqrt(cols).
//
// An element is a sum of four random bytes, which is near-normal and at most 3.5 standard
// deviations. The product P = M q_warm^T sums the noise over all columns, so normal elements would
// give the same P in all that matters. The sum takes integer arithmetic only, and four elements
// share a counter.

namespace powersgd::kernels {

// The columns of a row are taken in groups of 128. Counter `lane` of a group has in its words the
// group's columns lane, lane + 32, lane + 64 and lane + 96: vectors and warps store side by side.
constexpr int kNoiseLanes = 32;
constexpr int kNoiseColumns = 4 * kNoiseLanes;

// The counter of the first lane of the group that begins at `column`. The other lanes' follow in
// the first word, without a carry.
POWERSGD_HOST_DEVICE inline Philox4 first_noise_counter(const Bucket& bucket, uint64_t random_id,
                                                        int64_t row, int64_t column) {
  return random_counter(random_id, bucket.state->step, RandomUse::kWarmStart,
                        static_cast<uint32_t>(row),
                        static_cast<uint64_t>(column / kNoiseColumns * kNoiseLanes));
}

// The factor of noise_element. A sum of four bytes has the variance (2^16 - 1) / 3.
POWERSGD_HOST_DEVICE inline float noise_amplitude(const Bucket& bucket, const Matrix& matrix) {
  const double variance = 65535.0 / 3 * static_cast<double>(matrix.cols);
  return static_cast<float>(bucket.warm_start_noise / std::sqrt(variance));
}

// The noise that a random word stands for, rounded once.
POWERSGD_HOST_DEVICE inline float noise_element(uint32_t word, float amplitude) {
  const uint32_t pairs = (word & 0x00FF00FFu) + (word >> 8 & 0x00FF00FFu);
  const auto sum = static_cast<int32_t>((pairs & 0xFFFFu) + (pairs >> 16));
  return static_cast<float>(sum - 510) * amplitude;
}

}  // namespace powersgd::kernels
