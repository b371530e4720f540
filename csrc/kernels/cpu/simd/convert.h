// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "kernels/cpu/simd/instructions.h"
#include "kernels/cpu/simd/storage.h"
#include "kernels/cpu/simd/vector.h"

// Conversion between storage types and float, in which kernels compute. Rounding is to nearest
// even, so that every target gives the same bits, NaN aside.
namespace powersgd::kernels::cpu::POWERSGD_TARGET {

inline HalfWords load_half_words(const void* source) {
  return *static_cast<const VectorOf<uint16_t, kVectorBytes / 2>::Unaligned*>(source);
}

inline void store_half_words(void* target, HalfWords value) {
  *static_cast<VectorOf<uint16_t, kVectorBytes / 2>::Unaligned*>(target) = value;
}

// Returns the words of floats whose upper halves are those floats rounded to bfloat16. A NaN stays
// one if it comes from arithmetic, as all NaN here do: the lower half of such a NaN is 0.
inline Words rounded_to_bfloat16(Floats value) {
  const Words bits = bits_as<Words>(value);
  return bits + 0x7FFFu + ((bits >> 16) & 1u);
}

// Returns one vector of floats from as many stored elements.
template <class Storage>
inline Floats load_as(const Storage* source) {
  if constexpr (std::is_same_v<Storage, BFloat16>) {
    return bits_as<Floats>(widened(load_half_words(source)) << 16);
  } else if constexpr (std::is_same_v<Storage, Half>) {
    return from_half(load_half_words(source));
  } else {
    return load(source);
  }
}

// Stores a vector, and returns it as it was stored.
template <class Storage>
inline Floats store_rounded(Storage* target, Floats value) {
  if constexpr (std::is_same_v<Storage, BFloat16>) {
    const Words rounded = rounded_to_bfloat16(value);
    store_half_words(target, narrowed(rounded >> 16));
    return bits_as<Floats>(rounded & 0xFFFF0000u);
  } else if constexpr (std::is_same_v<Storage, Half>) {
    const HalfWords half_words = to_half(value);
    store_half_words(target, half_words);
    return from_half(half_words);
  } else {
    store(target, value);
    return value;
  }
}

// Returns the upper halves of the words of a, then those of b.
template <size_t... kLane>
inline Vector<uint16_t> upper_halves(Words a, Words b, std::index_sequence<kLane...>) {
  using V = Vector<uint16_t>;
  return POWERSGD_SHUFFLE(V, bits_as<V>(a), bits_as<V>(b), (2 * kLane + 1)...);
}

// A store past the caches, if kNontemporal, to an address that is then aligned to the vector.
template <bool kNontemporal, class V>
inline void store_converted(void* target, V value) {
  if constexpr (kNontemporal) {
    store_nontemporal(target, value);
  } else {
    std::memcpy(target, &value, sizeof(value));
  }
}

// store_rounded of several vectors, past the caches if kNontemporal. Narrowing two vectors of
// bfloat16 together costs half as much as one by one.
template <bool kNontemporal, class Storage, int kCount>
inline void store_all_as(Storage* target, const Floats (&values)[kCount]) {
  constexpr int64_t kLane = kLanes<float>;
  if constexpr (std::is_same_v<Storage, BFloat16> && kCount % 2 == 0) {
    constexpr std::make_index_sequence<2 * static_cast<size_t>(kLane)> kAllLanes;
    POWERSGD_UNROLL
    for (int i = 0; i < kCount; i += 2) {
      const Words first = rounded_to_bfloat16(values[i]);
      const Words second = rounded_to_bfloat16(values[i + 1]);
      store_converted<kNontemporal>(target + i * kLane, upper_halves(first, second, kAllLanes));
    }
  } else {
    POWERSGD_UNROLL
    for (int i = 0; i < kCount; ++i) {
      if constexpr (std::is_same_v<Storage, float>) {
        store_converted<kNontemporal>(target + i * kLane, values[i]);
      } else if constexpr (std::is_same_v<Storage, Half>) {
        store_converted<kNontemporal>(target + i * kLane, to_half(values[i]));
      } else {
        const Words rounded = rounded_to_bfloat16(values[i]);
        store_converted<kNontemporal>(target + i * kLane, narrowed(rounded >> 16));
      }
    }
  }
}

// Calls body(j, count) for each vector of [0, size): count elements from j on. Except for the last
// one, which may be incomplete, count is a constant once all is inlined, and the slow case is gone.
// kTurn vectors share the instructions of the loop itself.
template <int kTurn = 1, class Body>
inline void for_each_vector(int64_t size, const Body& body) {
  constexpr int64_t kLane = kLanes<float>;
  int64_t j = 0;
  for (; j + kTurn * kLane <= size; j += kTurn * kLane) {
    POWERSGD_UNROLL
    for (int i = 0; i < kTurn; ++i) body(j + i * kLane, kLane);
  }
  if constexpr (kTurn > 1) {
    for (; j + kLane <= size; j += kLane) body(j, kLane);
  }
  if (j < size) body(j, size - j);
}

// load_as of the first `count` elements, followed by zeros.
template <class Storage>
inline Floats load_first(const Storage* source, int64_t count) {
  constexpr int64_t kLane = kLanes<float>;
  if (count == kLane) return load_as(source);
  Storage padded[kLane] = {};
  std::copy_n(source, count, padded);
  return load_as(padded);
}

// store_rounded of the first `count` elements.
template <class Storage>
inline Floats store_first(Storage* target, int64_t count, Floats value) {
  constexpr int64_t kLane = kLanes<float>;
  if (count == kLane) return store_rounded(target, value);
  Storage converted[kLane];
  const Floats stored = store_rounded(converted, value);
  std::copy_n(converted, count, target);
  return stored;
}

// As many floats as Doubles has lanes.
using HalfFloats = VectorOf<float, kVectorBytes / 2>::Unaligned;

inline Doubles load_double(const float* source) {
  return __builtin_convertvector(*reinterpret_cast<const HalfFloats*>(source), Doubles);
}

inline void store_double(float* target, Doubles value) {
  *reinterpret_cast<HalfFloats*>(target) = __builtin_convertvector(value, HalfFloats);
}

// Returns the values, with 0 instead of non-finite ones.
inline Floats finite_or_zero(Floats value) {
  const Floats zero = {};
  return value - value == zero ? value : zero;
}

// Returns values of at most kLargest<Storage> in magnitude. None may be NaN.
template <class Storage>
inline Floats clamped_to(Floats value) {
  return within(value, broadcast(kLargest<Storage>));
}

}  // namespace powersgd::kernels::cpu::POWERSGD_TARGET
