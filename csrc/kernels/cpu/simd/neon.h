// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <arm_neon.h>

#include "kernels/cpu/simd/vector.h"

// instructions.h with NEON, which every 64-bit ARM CPU has, FMA and conversion of float16 included.
namespace powersgd::kernels::cpu::POWERSGD_TARGET {

inline Floats multiply_add(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }
inline Floats multiply_add_reproducibly(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }
inline Doubles multiply_add_reproducibly(Doubles a, Doubles b, Doubles c) { return a * b + c; }

inline Floats greater(Floats a, Floats b) { return vmaxq_f32(a, b); }
inline Floats lesser(Floats a, Floats b) { return vminq_f32(a, b); }

inline Floats within(Floats value, Floats largest) {
  return lesser(greater(value, -largest), largest);
}

inline Words widened(HalfWords half_words) { return vmovl_u16(half_words); }
inline HalfWords narrowed(Words words) { return vmovn_u32(words); }

inline Floats from_half(HalfWords half_words) {
  return vcvt_f32_f16(bits_as<float16x4_t>(half_words));
}
inline HalfWords to_half(Floats value) { return bits_as<HalfWords>(vcvt_f16_f32(value)); }

// The CPU itself sees that whole lines are overwritten, and reads none of them.
template <class V>
inline void store_nontemporal(void* target, V value) {
  *static_cast<V*>(target) = value;
}
inline void nontemporal_fence() {}

}  // namespace powersgd::kernels::cpu::POWERSGD_TARGET
