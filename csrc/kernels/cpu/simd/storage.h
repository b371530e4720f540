// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>

// The types that elements are stored in, and the type that kernels compute in.
namespace powersgd::kernels::cpu {

struct BFloat16 {
  uint16_t bits;
};

struct Half {
  uint16_t bits;
};

template <class Storage>
struct StorageTraits {
  using Compute = float;
};
template <>
struct StorageTraits<double> {
  using Compute = double;
};
template <class Storage>
using ComputeOf = typename StorageTraits<Storage>::Compute;

// The largest finite value of a storage type. Residuals and codes are clamped to it.
template <class Storage>
constexpr ComputeOf<Storage> kLargest = 0;
template <>
constexpr float kLargest<float> = 3.40282347e+38f;
template <>
constexpr double kLargest<double> = 1.7976931348623157e+308;
template <>
constexpr float kLargest<BFloat16> = 3.38953139e+38f;

}  // namespace powersgd::kernels::cpu
