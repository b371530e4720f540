// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace powersgd::kernels::cuda {

// Afterwards a thread sees what others have written before a fence and a change of the counter.
__device__ __forceinline__ uint64_t load_acquire([[maybe_unused]] const uint64_t* counter) {
  uint64_t value = 0;
#if defined(__CUDA_ARCH__)
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(counter) : "memory");
#endif
  return value;
}

// What the thread has written or seen before goes before what it writes to a counter afterwards.
// __threadfence() also orders all such fences among each other, which takes longer.
__device__ __forceinline__ void release_fence() {
#if defined(__CUDA_ARCH__)
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
#endif
}

}  // namespace powersgd::kernels::cuda
