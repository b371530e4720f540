// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>

// The types that elements are stored in. Kernels compute in float.
namespace powersgd::kernels::cpu {

struct BFloat16 {
  uint16_t bits;
};

struct Half {
  uint16_t bits;
};

// The largest finite value of a storage type. Residuals and codes are clamped to it.
template <class Storage>
constexpr float kLargest = 0;
template <>
constexpr float kLargest<float> = 3.40282347e+38f;
template <>
constexpr float kLargest<BFloat16> = 3.38953139e+38f;

}  // namespace powersgd::kernels::cpu
