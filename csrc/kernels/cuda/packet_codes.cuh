// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <type_traits>

#include "kernels/cuda/elements.cuh"
#include "kernels/shared/packet_layout.h"

// Codes of elements, in each wire dtype. A warp takes a group. Its lane l has the elements l and
// l + 32, so that every access to memory is to neighbors, at any alignment of the payload.

namespace powersgd::kernels::cuda {

constexpr int kElementsOfLane = static_cast<int>(kGroup) / kWarpSize;
static_assert(kElementsOfLane == 2);

// encode() takes a value and what inverse_of() says of the group's scale. decode() returns what a
// code stands for. store() and load() access the codes of a lane in its group.
template <WireDType kWire>
struct Codes;

// A group whose elements take a word of type Stored each, in their order.
template <typename Stored>
struct WordCodes {
  static __device__ __forceinline__ void store(uint8_t* group, int lane, const Stored (&code)[2]) {
    Stored* const codes = reinterpret_cast<Stored*>(group);
    codes[lane] = code[0];
    codes[lane + kWarpSize] = code[1];
  }
  static __device__ __forceinline__ void load(const uint8_t* group, int lane, Stored (&code)[2]) {
    const Stored* const codes = reinterpret_cast<const Stored*>(group);
    code[0] = codes[lane];
    code[1] = codes[lane + kWarpSize];
  }
};

template <>
struct Codes<WireDType::kBFloat16> : WordCodes<uint16_t> {
  using Code = uint16_t;
  static __device__ __forceinline__ Code encode(float value, float) {
    return float_to_bfloat16(is_finite(value) ? clamp_to(value, kLargestBfloat16) : value);
  }
  static __device__ __forceinline__ float decode(Code code, float) {
    return bfloat16_to_float(code);
  }
};

// The nearest of the integers of magnitude kMost or less, ties to even.
template <int kMost>
__device__ __forceinline__ int nearest_code(float value) {
  return static_cast<int>(clamp_to(rintf(value), static_cast<float>(kMost)));
}

template <>
struct Codes<WireDType::kInt8> : WordCodes<int8_t> {
  using Code = int8_t;
  static __device__ __forceinline__ Code encode(float value, float inverse) {
    return static_cast<int8_t>(nearest_code<127>(value * inverse));
  }
  static __device__ __forceinline__ float decode(Code code, float scale) {
    return static_cast<float>(code) * scale;
  }
};

// Byte l of a group has the codes of lane l, the first in its lower half.
template <>
struct Codes<WireDType::kInt4> {
  using Code = int8_t;
  static __device__ __forceinline__ Code encode(float value, float inverse) {
    return static_cast<int8_t>(nearest_code<7>(value * inverse));
  }
  static __device__ __forceinline__ float decode(Code code, float scale) {
    return static_cast<float>(code) * scale;
  }
  static __device__ __forceinline__ void store(uint8_t* group, int lane, const Code (&code)[2]) {
    group[lane] = static_cast<uint8_t>((code[0] & 15) | (code[1] & 15) << 4);
  }
  static __device__ __forceinline__ void load(const uint8_t* group, int lane, Code (&code)[2]) {
    const int both = group[lane];
    code[0] = static_cast<int8_t>(((both & 15) ^ 8) - 8);
    code[1] = static_cast<int8_t>((both >> 4 ^ 8) - 8);
  }
};

// Calls visit(std::integral_constant<WireDType, dtype>()).
template <typename Visit>
__device__ __forceinline__ void with_wire(WireDType dtype, const Visit& visit) {
  switch (dtype) {
    case WireDType::kBFloat16:
      return visit(std::integral_constant<WireDType, WireDType::kBFloat16>());
    case WireDType::kInt8:
      return visit(std::integral_constant<WireDType, WireDType::kInt8>());
    case WireDType::kInt4:
      return visit(std::integral_constant<WireDType, WireDType::kInt4>());
  }
}

}  // namespace powersgd::kernels::cuda
