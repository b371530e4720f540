// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "kernels/cpu/simd/vector.h"

// a * b + c. For floats it is rounded once, on every instruction set: where there is no FMA it is
// computed in double, so that all ranks have the same bits and those that have one may use it.
namespace powersgd::kernels::cpu {

// a + b, rounded to odd: what is not exact is cut off, towards zero, and its last bit set.
template <class Arch>
POWERSGD_INLINE Vector<Arch, double> sum_rounded_to_odd(const Vector<Arch, double>& a,
                                                        const Vector<Arch, double>& b) {
  using Bits = Vector<Arch, int64_t>;
  const Vector<Arch, double> sum = a + b;
  // What rounding to nearest took away (Knuth's TwoSum).
  const Vector<Arch, double> added = sum - a;
  const Vector<Arch, double> error = (a - (sum - added)) + (b - added);
  // A comparison is -1 where it holds; with a NaN it does not.
  const Bits above = error > 0.0;
  const Bits inexact = above | (error < 0.0);
  const Bits away_from_zero = inexact & (above ^ (sum > 0.0));
  return bits_as<Vector<Arch, double>>((bits_as<Bits>(sum) + away_from_zero) | (inexact & 1));
}

// A double holds the product of two floats exactly. Were its sum with c rounded to nearest, it
// could end up in the middle between two floats, and the rounding to float go the wrong way. Sylvie
// Boldo and Guillaume Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms
// using rounding to odd", IEEE Transactions on Computers 57(4), 2008.
template <class Arch>
POWERSGD_INLINE Vector<Arch, float> emulated_fma(const Vector<Arch, float>& a,
                                                 const Vector<Arch, float>& b,
                                                 const Vector<Arch, float>& c) {
  using Doubles = Vector<Arch, double>;
  using Bits = Vector<Arch, int64_t>;
  using Half = typename VectorOf<float, Arch::kVectorBytes / 2>::Type;
  static_assert(sizeof(Half) == sizeof(int64_t), "an element of Bits is half a vector");
  Bits result;
  POWERSGD_UNROLL
  for (int i = 0; i < 2; ++i) {
    const auto half = [i](const Vector<Arch, float>& whole) POWERSGD_INLINE_LAMBDA {
      return __builtin_convertvector(bits_as<Half>(bits_as<Bits>(whole)[i]), Doubles);
    };
    const Doubles sum = sum_rounded_to_odd<Arch>(half(a) * half(b), half(c));
    result[i] = bits_as<int64_t>(__builtin_convertvector(sum, Half));
  }
  return bits_as<Vector<Arch, float>>(result);
}

template <class Arch>
POWERSGD_INLINE Vector<Arch, float> multiply_add(const Vector<Arch, float>& a,
                                                 const Vector<Arch, float>& b,
                                                 const Vector<Arch, float>& c) {
  if constexpr (Arch::kHasAvx) {
    Vector<Arch, float> sum = c;
    asm("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "vm"(b));
    return sum;
  } else {
#if defined(__FP_FAST_FMAF)
    Vector<Arch, float> sum;
    POWERSGD_UNROLL
    for (int i = 0; i < kLanes<Arch, float>; ++i) sum[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return sum;
#else
    return emulated_fma<Arch>(a, b, c);
#endif
  }
}

template <class Arch>
POWERSGD_INLINE Vector<Arch, double> multiply_add(const Vector<Arch, double>& a,
                                                  const Vector<Arch, double>& b,
                                                  const Vector<Arch, double>& c) {
  return a * b + c;
}

}  // namespace powersgd::kernels::cpu
