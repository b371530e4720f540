// SPDX-License-Identifier: BSD-3-Clause
#include "kernels/cpu/stages.h"

namespace powersgd::kernels::cpu {

const StageFunctions& stages_on(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx512) return avx512::kStages;
  if (isa == Isa::kAvx2) return avx2::kStages;
#endif
  static_cast<void>(isa);
  return baseline::kStages;
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

}  // namespace powersgd::kernels::cpu
