// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "cuda_runtime.h"

// The part of CUDA's header of this name that the kernels use.

// NOLINTBEGIN: the names below are CUDA's.
struct __half {
  uint16_t bits;
};

inline __half __ushort_as_half(uint16_t bits) { return {bits}; }
inline uint16_t __half_as_ushort(__half half) { return half.bits; }

inline float __half2float(__half half) {
  const uint32_t exponent = half.bits >> 10 & 31, fraction = half.bits & 1023;
  const float sign = half.bits >> 15 ? -1.0f : 1.0f;
  if (exponent == 31) return fraction ? NAN : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(fraction), -24);
  return sign * std::ldexp(static_cast<float>(fraction | 1024), static_cast<int>(exponent) - 25);
}

// Rounds to nearest, ties to even.
inline __half __float2half_rn(float value) {
  const auto sign = static_cast<uint16_t>(__float_as_uint(value) >> 16 & 0x8000);
  const float magnitude = std::fabs(value);
  const auto with_sign = [sign](uint32_t bits) {
    return __half{static_cast<uint16_t>(sign | bits)};
  };
  if (!(magnitude < 65520.0f)) return with_sign(std::isnan(value) ? 0x7FFF : 0x7C00);
  if (magnitude < 6.103515625e-05f)  // subnormal: a multiple of 2^-24
    return with_sign(static_cast<uint32_t>(std::nearbyint(std::ldexp(magnitude, 24))));
  const uint32_t bits = __float_as_uint(magnitude);
  const uint32_t rounded = bits + 0xFFF + (bits >> 13 & 1);
  return with_sign((rounded >> 13) - (112u << 10));
}
// NOLINTEND
