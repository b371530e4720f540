// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "cuda_runtime.h"

// The part of CUDA's header of this name that the kernels use.

// NOLINTBEGIN: the names below are CUDA's.
struct __nv_bfloat16 {
  uint16_t bits;
};

inline uint16_t __bfloat16_as_ushort(__nv_bfloat16 value) { return value.bits; }

// Rounds to nearest, ties to even.
inline __nv_bfloat16 __float2bfloat16_rn(float value) {
  if (std::isnan(value)) return {0x7FFF};
  const uint32_t bits = __float_as_uint(value);
  return {static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16)};
}
// NOLINTEND
