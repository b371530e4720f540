// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cuda_runtime.h>

namespace powersgd::kernels::cuda {

// The block's dynamic shared memory, of the size that the launch asked for.
__device__ __forceinline__ unsigned char* shared_memory() {
  extern __shared__ __align__(16) unsigned char dynamic_shared_memory[];
  return dynamic_shared_memory;
}

}  // namespace powersgd::kernels::cuda
