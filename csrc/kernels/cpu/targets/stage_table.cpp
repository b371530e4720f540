// SPDX-License-Identifier: BSD-3-Clause
#include "kernels/cpu/targets/stage_table.h"

namespace powersgd::kernels::cpu {

const StageFunctions& stages_on(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx512) return avx512::kStages;
  if (isa == Isa::kAvx2) return avx2::kStages;
#endif
  static_cast<void>(isa);
  return baseline::kStages;
}

const PacketFunctions& packets_on(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx512) return avx512::kPackets;
  if (isa == Isa::kAvx2) return avx2::kPackets;
#endif
  static_cast<void>(isa);
  return baseline::kPackets;
}

const char* instruction_set() {
  switch (best_isa()) {
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kBaseline:
      break;
  }
#if defined(__aarch64__)
  return "neon";
#else
  return "baseline";
#endif
}

void project(const Bucket& bucket, const ParallelFor& parallel_for) {
  stages_on(best_isa()).project(bucket, parallel_for);
}

void orthogonalize(const Bucket& bucket, const ParallelFor& parallel_for) {
  stages_on(best_isa()).orthogonalize(bucket, parallel_for);
}

void back_project(const Bucket& bucket, const ParallelFor& parallel_for) {
  stages_on(best_isa()).back_project(bucket, parallel_for);
}

void reconstruct(const Bucket& bucket, const ParallelFor& parallel_for) {
  stages_on(best_isa()).reconstruct(bucket, parallel_for);
}

void quantize(const Packets& packets, const ParallelFor& parallel_for) {
  packets_on(best_isa()).quantize(packets, parallel_for);
}

void requantize(const Packets& packets, const ParallelFor& parallel_for) {
  packets_on(best_isa()).requantize(packets, parallel_for);
}

void dequantize(const Packets& packets, const ParallelFor& parallel_for) {
  packets_on(best_isa()).dequantize(packets, parallel_for);
}

}  // namespace powersgd::kernels::cpu
