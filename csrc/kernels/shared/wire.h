// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cmath>

#include "kernels/shared/host_device.h"
#include "powersgd/kernels.h"

// The scales of a float16 wire. All ranks and both devices choose the same ones, because a scale is
// a power of two that follows from the exponent of a sum alone.
//
// A scale takes the largest element of a sum to 2^11 if it is as large as in the step before.
// float16 ends at 2^16, so a payload may grow 32-fold in a step. A payload that overflows sums to
// an infinity, which skips the step. The next scale is then 2^8 times smaller.

namespace powersgd::kernels {

constexpr int kScaledExponent = 11;
// The exponents of all scales lie in [-kMaxScaleExponent, kMaxScaleExponent], so that neither a
// scale nor its reciprocal leaves the range of float.
constexpr int kMaxScaleExponent = 100;
constexpr float kAfterOverflow = 1.0F / 256;

// Returns whether a payload loses digits on the wire.
POWERSGD_HOST_DEVICE inline bool wire_rounds(const Bucket& bucket) {
  return bucket.wire_dtype != bucket.factor_dtype;
}

// Returns what a payload is multiplied by if `scale` is its WireScale::current or ::next.
POWERSGD_HOST_DEVICE inline float wire_scale(const Bucket& bucket, float scale) {
  return bucket.wire_dtype == DType::kFloat16 && scale != 0 ? scale : 1.0F;
}

// Returns the scale after `last`, from the largest magnitude of a sum. It is 2^k with
// k = floor(log2(2048 / largest)). A sum of zeros leaves the scale as it is.
POWERSGD_HOST_DEVICE inline float next_scale(double largest, float last) {
  const float known = last == 0 ? 1.0F : last;
  if (!(largest - largest == 0)) {  // it is not finite
    const float smallest = std::ldexp(1.0F, -kMaxScaleExponent);
    return known * kAfterOverflow > smallest ? known * kAfterOverflow : smallest;
  }
  if (largest == 0) return known;
  int exponent = 0;  // largest = fraction * 2^exponent, and 1/2 <= fraction < 1
  const double fraction = std::frexp(largest, &exponent);
  const int k = kScaledExponent - exponent + (fraction == 0.5 ? 1 : 0);
  const int at_least = k > -kMaxScaleExponent ? k : -kMaxScaleExponent;
  return std::ldexp(1.0F, at_least < kMaxScaleExponent ? at_least : kMaxScaleExponent);
}

}  // namespace powersgd::kernels
