// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/cpu/largest.h"
#include "kernels/cpu/simd/convert.h"
#include "kernels/shared/packet_layout.h"

// The codes of one group: kGroup floats, rounded to a wire dtype and back. Every target writes the
// same codes.
namespace powersgd::kernels::cpu::POWERSGD_TARGET {

// Integers are the digits of 16 words, whatever the size of a vector: element 16 j + i is digit j
// of word i. So no digit changes its lane. int8 has words of 32 bits, int4 of 16 bits.
constexpr int64_t kWords = 16;
constexpr int64_t kDigits = kGroup / kWords;
static_assert(kLanes<float> <= kWords);

// The sum of this and a float is rounded to an integer, which the lowest bits of the sum hold.
constexpr float kIntegers = 0x1.8p23F;

template <int kBits>
inline void encode_integers(const float* values, float inverse, uint8_t* codes) {
  constexpr uint32_t kMask = (1U << kBits) - 1;
  for (int64_t i = 0; i < kWords; i += kLanes<float>) {
    Words words = {};
    POWERSGD_UNROLL
    for (int j = 0; j < kDigits; ++j) {
      const Floats integers = load(values + kWords * j + i) * inverse + kIntegers;
      words |= (bits_as<Words>(integers) & kMask) << (kBits * j);
    }
    if constexpr (kBits == 8) {
      std::memcpy(codes + 4 * i, &words, sizeof(words));
    } else {
      store_half_words(codes + 2 * i, narrowed(words));
    }
  }
}

template <int kBits>
inline void decode_integers(const uint8_t* codes, float scale, float* values) {
  for (int64_t i = 0; i < kWords; i += kLanes<float>) {
    Words words;
    if constexpr (kBits == 8) {
      std::memcpy(&words, codes + 4 * i, sizeof(words));
    } else {
      words = widened(load_half_words(codes + 2 * i));
    }
    POWERSGD_UNROLL
    for (int j = 0; j < kDigits; ++j) {
      using Integers = Vector<int32_t>;
      const Words on_top = words << (32 - kBits * (j + 1));
      const Integers digits = bits_as<Integers>(on_top) >> (32 - kBits);
      store(values + kWords * j + i, __builtin_convertvector(digits, Floats) * scale);
    }
  }
}

// Returns values of at most bfloat16's largest magnitude. Non-finite values stay so.
inline Words encoded_bfloat16(Floats value) {
  const Floats zero = {};
  const Words finite = rounded_to_bfloat16(clamped_to<BFloat16>(finite_or_zero(value)));
  return value - value == zero ? finite : bits_as<Words>(value);
}

inline void encode_bfloat16(const float* values, uint8_t* codes) {
  constexpr int64_t kLane = kLanes<float>;
  constexpr std::make_index_sequence<2 * static_cast<size_t>(kLane)> kAllLanes;
  for (int64_t i = 0; i < kGroup; i += 2 * kLane) {
    const Words first = encoded_bfloat16(load(values + i));
    const Words second = encoded_bfloat16(load(values + i + kLane));
    const auto halves = upper_halves(first, second, kAllLanes);
    std::memcpy(codes + 2 * i, &halves, sizeof(halves));
  }
}

inline void decode_bfloat16(const uint8_t* codes, float* values) {
  const auto* source = reinterpret_cast<const BFloat16*>(codes);
  for (int64_t i = 0; i < kGroup; i += kLanes<float>) store(values + i, load_as(source + i));
}

// Writes the codes of a group. The values of int8 and int4 are those that the scale was made for.
POWERSGD_TILE_FUNCTION inline void encode(WireDType dtype, const float* values, float scale,
                                          uint8_t* codes) {
  switch (dtype) {
    case WireDType::kBFloat16:
      break;
    case WireDType::kInt8:
      return encode_integers<8>(values, inverse_of(scale), codes);
    case WireDType::kInt4:
      return encode_integers<4>(values, inverse_of(scale), codes);
  }
  encode_bfloat16(values, codes);
}

POWERSGD_TILE_FUNCTION inline void decode(WireDType dtype, const uint8_t* codes, float scale,
                                          float* values) {
  switch (dtype) {
    case WireDType::kBFloat16:
      break;
    case WireDType::kInt8:
      return decode_integers<8>(codes, scale, values);
    case WireDType::kInt4:
      return decode_integers<4>(codes, scale, values);
  }
  decode_bfloat16(codes, values);
}

POWERSGD_TILE_FUNCTION inline float largest_of_group(const float* values) {
  LargestOfLanes largest;
  for (int64_t i = 0; i < kGroup; i += kLanes<float>) largest.add(load(values + i));
  return largest.get();
}

}  // namespace powersgd::kernels::cpu::POWERSGD_TARGET
