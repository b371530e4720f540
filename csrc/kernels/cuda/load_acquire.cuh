// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace powersgd::kernels::cuda {

// What another thread has written before it increased the counter can be read after this.
__device__ __forceinline__ uint64_t load_acquire([[maybe_unused]] const uint64_t* counter) {
  uint64_t value = 0;
#if defined(__CUDA_ARCH__)
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(counter) : "memory");
#endif
  return value;
}

}  // namespace powersgd::kernels::cuda
