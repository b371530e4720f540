// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <immintrin.h>

#include "kernels/cpu/simd/vector.h"

// instructions.h with AVX-512 (F, BW, DQ, VL).
namespace powersgd::kernels::cpu::POWERSGD_TARGET {

inline Floats broadcast(float x) { return _mm512_set1_ps(x); }
inline Doubles broadcast(double x) { return _mm512_set1_pd(x); }

inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats multiply_add_reproducibly(Floats a, Floats b, Floats c) {
  return _mm512_fmadd_ps(a, b, c);
}
inline Doubles multiply_add_reproducibly(Doubles a, Doubles b, Doubles c) { return a * b + c; }

inline Floats greater(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats lesser(Floats a, Floats b) { return _mm512_min_ps(a, b); }

// The lesser of both in magnitude, with the sign of the first.
constexpr int kLesserMagnitude = 2;
inline Floats within(Floats value, Floats largest) {
  return _mm512_range_ps(value, largest, kLesserMagnitude);
}

inline Words widened(HalfWords half_words) {
  return bits_as<Words>(_mm512_cvtepu16_epi32(bits_as<__m256i>(half_words)));
}
inline HalfWords narrowed(Words words) {
  return bits_as<HalfWords>(_mm512_cvtepi32_epi16(bits_as<__m512i>(words)));
}

inline Floats from_half(HalfWords half_words) {
  return _mm512_cvtph_ps(bits_as<__m256i>(half_words));
}
inline HalfWords to_half(Floats value) {
  return bits_as<HalfWords>(_mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
}

template <class V>
inline void store_nontemporal(void* target, V value) {
  if constexpr (sizeof(V) == kVectorBytes) {
    _mm512_stream_si512(static_cast<__m512i*>(target), bits_as<__m512i>(value));
  } else {
    _mm256_stream_si256(static_cast<__m256i*>(target), bits_as<__m256i>(value));
  }
}
inline void nontemporal_fence() { _mm_sfence(); }

}  // namespace powersgd::kernels::cpu::POWERSGD_TARGET
