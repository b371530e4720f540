// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "simd.h"

// a * b + c. For floats it is rounded once, on every instruction set: where there is no FMA it is
// computed in double, so that all ranks have the same bits and those that have one may use it.
namespace powersgd::kernels::cpu {

// Doubles hold the product of two floats exactly. Their sum with c is rounded to odd: were it
// rounded to nearest, it could end up in the middle between two floats, and the rounding to float
// go the wrong way. Sylvie Boldo and Guillaume Melquiond, "Emulation of FMA and correctly rounded
// sums: proved algorithms using rounding to odd", IEEE Transactions on Computers 57(4), 2008.
template <class Arch>
POWERSGD_INLINE Vector<Arch, float> emulated_fma(const Vector<Arch, float>& a,
                                                 const Vector<Arch, float>& b,
                                                 const Vector<Arch, float>& c) {
  using Doubles = typename VectorOf<double, 2 * Arch::kVectorBytes>::Type;
  using Bits = typename VectorOf<int64_t, 2 * Arch::kVectorBytes>::Type;
  const Doubles product = __builtin_convertvector(a, Doubles) * __builtin_convertvector(b, Doubles);
  const Doubles addend = __builtin_convertvector(c, Doubles);
  const Doubles sum = product + addend;
  // What the rounding of the sum took away (Knuth's TwoSum).
  const Doubles added = sum - product;
  const Doubles error = (product - (sum - added)) + (addend - added);
  // A comparison is -1 where it holds; with a NaN it does not.
  const Bits bits = bits_as<Bits>(sum);
  const Bits inexact = (error > 0.0) | (error < 0.0);
  const Bits even = (bits & 1) == 0;
  const Bits away_from_zero = (error > 0.0) == (sum > 0.0);
  const Bits odd = bits - (2 * away_from_zero + 1);
  const Bits rounded = (inexact & even) != 0 ? odd : bits;
  return __builtin_convertvector(bits_as<Doubles>(rounded), Vector<Arch, float>);
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
