// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cmath>

#include "kernels/cpu/simd/vector.h"

// instructions.h for any CPU.
namespace powersgd::kernels::cpu::POWERSGD_TARGET {

// By std::fma of each lane, which is slow where the CPU has no FMA.
inline Floats fused_multiply_add(Floats a, Floats b, Floats c) {
  Floats sum;
  POWERSGD_UNROLL
  for (int i = 0; i < kLanes<float>; ++i) sum[i] = std::fma(a[i], b[i], c[i]);
  return sum;
}

inline Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__FP_FAST_FMAF)
  return fused_multiply_add(a, b, c);
#else
  return a * b + c;
#endif
}

inline Floats multiply_add_reproducibly(Floats a, Floats b, Floats c) {
  return fused_multiply_add(a, b, c);
}
inline Doubles multiply_add_reproducibly(Doubles a, Doubles b, Doubles c) { return a * b + c; }

inline Floats greater(Floats a, Floats b) { return a > b ? a : b; }
inline Floats lesser(Floats a, Floats b) { return a < b ? a : b; }
inline Floats within(Floats value, Floats largest) {
  return lesser(greater(value, -largest), largest);
}

inline Words widened(HalfWords half_words) { return __builtin_convertvector(half_words, Words); }
inline HalfWords narrowed(Words words) { return __builtin_convertvector(words, HalfWords); }

// Fabian Giesen, "Half to float done quick" and "Float->half variants" (2012).
inline Floats from_half(HalfWords half_words) {
  constexpr uint32_t kRebias = 112u << 23;
  const Words words = widened(half_words);
  const Words magnitude = (words & 0x7FFFu) << 13;
  const Words exponent = words & 0x7C00u;
  const Words normal = magnitude + kRebias;
  // A subnormal is the mantissa added to a power of two, less that power of two.
  const Words offset = broadcast(113u << 23);
  const Words subnormal =
      bits_as<Words>(bits_as<Floats>(magnitude + offset) - bits_as<Floats>(offset));
  const Words finite = exponent == 0u ? subnormal : normal;
  const Words result = exponent == 0x7C00u ? normal + kRebias : finite;
  return bits_as<Floats>(result | (words & 0x8000u) << 16);
}

inline HalfWords to_half(Floats value) {
  const Words bits = bits_as<Words>(value);
  const Words magnitude = bits & 0x7FFFFFFFu;
  constexpr uint32_t kInfinity = 0x7C00u, kNan = 0x7E00u;
  const Words special = magnitude > 0x7F800000u ? broadcast(kNan) : broadcast(kInfinity);
  // The addition of 0.5 aligns the mantissa of what becomes subnormal, and the adder rounds it.
  const Words half = broadcast(126u << 23);
  const Words subnormal = bits_as<Words>(bits_as<Floats>(magnitude) + bits_as<Floats>(half)) - half;
  const Words normal = (magnitude + (0xFFFu - (112u << 23)) + ((magnitude >> 13) & 1u)) >> 13;
  const Words finite = magnitude < (113u << 23) ? subnormal : normal;
  const Words result = magnitude >= (143u << 23) ? special : finite;
  return narrowed(result | ((bits >> 16) & 0x8000u));
}

template <class V>
inline void store_nontemporal(void* target, V value) {
  *static_cast<V*>(target) = value;
}
inline void nontemporal_fence() {}

}  // namespace powersgd::kernels::cpu::POWERSGD_TARGET
