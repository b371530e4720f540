// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "kernels/cpu/simd/isa.h"
#include "powersgd/kernels.h"

// The stages on a named instruction set. The functions of powersgd/kernels.h run on the best one of
// this machine; tests run them all.
namespace powersgd::kernels::cpu {

void project(Isa isa, const Bucket& bucket, const ParallelFor& parallel_for);
void orthogonalize(Isa isa, const Bucket& bucket, const ParallelFor& parallel_for);
void back_project(Isa isa, const Bucket& bucket, const ParallelFor& parallel_for);
void reconstruct(Isa isa, const Bucket& bucket, const ParallelFor& parallel_for);

}  // namespace powersgd::kernels::cpu
