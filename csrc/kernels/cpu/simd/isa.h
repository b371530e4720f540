// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "powersgd/kernels.h"

// The stages on a named instruction set. The functions of powersgd/kernels.h run on the best one of
// this machine; tests run them all.
namespace powersgd::kernels::cpu {

enum class Isa { kBaseline, kAvx2, kAvx512 };

bool is_supported(Isa isa);
Isa best_isa();

void project(Isa isa, const Bucket& bucket, const ParallelFor& parallel_for);
void orthogonalize(Isa isa, const Bucket& bucket, const ParallelFor& parallel_for);
void back_project(Isa isa, const Bucket& bucket, const ParallelFor& parallel_for);
void project_transposed(Isa isa, const Bucket& bucket, const ParallelFor& parallel_for);
void reconstruct(Isa isa, const Bucket& bucket, const ParallelFor& parallel_for);

}  // namespace powersgd::kernels::cpu
