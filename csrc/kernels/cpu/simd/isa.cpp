// SPDX-License-Identifier: BSD-3-Clause
#include "kernels/cpu/simd/isa.h"

namespace powersgd::kernels::cpu {

bool is_supported(Isa isa) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  if (isa == Isa::kAvx2) return avx2;
  if (isa == Isa::kAvx512) {
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  }
#endif
  return isa == Isa::kBaseline;
}

Isa best_isa() {
  static const Isa best = is_supported(Isa::kAvx512) ? Isa::kAvx512
                          : is_supported(Isa::kAvx2) ? Isa::kAvx2
                                                     : Isa::kBaseline;
  return best;
}

}  // namespace powersgd::kernels::cpu
