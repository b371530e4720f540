// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "kernels/cpu/simd/vector.h"

namespace powersgd::kernels::cpu {

// a * b + c, rounded once on every instruction set, so that all ranks have the same bits. Without
// an instruction for it, std::fma computes it in software.
template <class Arch>
POWERSGD_INLINE Vector<Arch, float> multiply_add(const Vector<Arch, float>& a,
                                                 const Vector<Arch, float>& b,
                                                 const Vector<Arch, float>& c) {
  Vector<Arch, float> sum = c;
  if constexpr (Arch::kHasAvx) {
    asm("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "vm"(b));
  } else {
    POWERSGD_UNROLL
    for (int i = 0; i < kLanes<Arch, float>; ++i) sum[i] = __builtin_fmaf(a[i], b[i], c[i]);
  }
  return sum;
}

// a * b + c, rounded twice.
template <class Arch>
POWERSGD_INLINE Vector<Arch, double> multiply_add(const Vector<Arch, double>& a,
                                                  const Vector<Arch, double>& b,
                                                  const Vector<Arch, double>& c) {
  return a * b + c;
}

}  // namespace powersgd::kernels::cpu
