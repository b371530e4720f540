// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "simt/simt.h"

// Instead of csrc/kernels/cuda/shared_memory.cuh: C++ cannot give an array of CUDA's extern
// __shared__ kind to each block.
namespace powersgd::kernels::cuda {

inline unsigned char* shared_memory() { return simt::shared_memory(); }

}  // namespace powersgd::kernels::cuda
