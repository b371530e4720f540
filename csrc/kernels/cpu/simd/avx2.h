// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <immintrin.h>

#include "kernels/cpu/simd/vector.h"

// instructions.h with AVX2, FMA and F16C.
namespace powersgd::kernels::cpu::POWERSGD_TARGET {

inline Floats broadcast(float x) { return _mm256_set1_ps(x); }
inline Doubles broadcast(double x) { return _mm256_set1_pd(x); }

inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats multiply_add_reproducibly(Floats a, Floats b, Floats c) {
  return _mm256_fmadd_ps(a, b, c);
}
inline Doubles multiply_add_reproducibly(Doubles a, Doubles b, Doubles c) { return a * b + c; }

inline Floats greater(Floats a, Floats b) { return _mm256_max_ps(a, b); }
inline Floats lesser(Floats a, Floats b) { return _mm256_min_ps(a, b); }

inline Floats within(Floats value, Floats largest) {
  return lesser(greater(value, -largest), largest);
}

inline Words widened(HalfWords half_words) {
  return bits_as<Words>(_mm256_cvtepu16_epi32(bits_as<__m128i>(half_words)));
}
inline HalfWords narrowed(Words words) { return __builtin_convertvector(words, HalfWords); }

inline Floats from_half(HalfWords half_words) {
  return _mm256_cvtph_ps(bits_as<__m128i>(half_words));
}
inline HalfWords to_half(Floats value) {
  return bits_as<HalfWords>(_mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
}

template <class V>
inline void store_nontemporal(void* target, V value) {
  if constexpr (sizeof(V) == kVectorBytes) {
    _mm256_stream_si256(static_cast<__m256i*>(target), bits_as<__m256i>(value));
  } else {
    _mm_stream_si128(static_cast<__m128i*>(target), bits_as<__m128i>(value));
  }
}
inline void nontemporal_fence() { _mm_sfence(); }

}  // namespace powersgd::kernels::cpu::POWERSGD_TARGET
