// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/shared_memory.cuh"
#include "powersgd/kernels.h"

// How kernels are launched, and the few things that depend on the compiler.

#define POWERSGD_UNROLL _Pragma("unroll")
#define POWERSGD_UNROLL_4 _Pragma("unroll 4")
#define POWERSGD_UNROLL_8 _Pragma("unroll 8")
#define POWERSGD_NO_UNROLL _Pragma("unroll 1")

// Programmatic dependent launch (Hopper): a kernel's blocks may be placed while its predecessor
// drains, and wait in begin_kernel() until that one has ended. 0 turns it off.
#ifndef POWERSGD_DEPENDENT_LAUNCH
#define POWERSGD_DEPENDENT_LAUNCH 1
#endif

namespace powersgd::kernels::cuda {

// Every kernel calls this before it touches memory.
__device__ __forceinline__ void begin_kernel() {
#if POWERSGD_DEPENDENT_LAUNCH && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  // The next kernel may be placed as soon as every block of this one has been. It waits in turn
  // until this one has ended. All blocks come by here, so it thereby waits for all kernels before.
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The compiler takes the value for a new one. A loop then computes or loads again what is cheap,
// such as the address of every row of every array, and does not hold it in registers.
__device__ __forceinline__ void hide_from_optimizer([[maybe_unused]] int64_t& value) {
#if defined(__CUDA_ARCH__)
  asm volatile("" : "+l"(value));
#endif
}
__device__ __forceinline__ void hide_from_optimizer([[maybe_unused]] int& value) {
#if defined(__CUDA_ARCH__)
  asm volatile("" : "+r"(value));
#endif
}

// Only code compiled for Hopper waits in begin_kernel(). The device does not decide: code for an
// older one runs on a newer one.
inline Status waits_for_predecessor(const void* kernel, bool* waits) {
  *waits = false;
#if POWERSGD_DEPENDENT_LAUNCH
  cudaFuncAttributes attributes{};
  if (const cudaError_t status = cudaFuncGetAttributes(&attributes, kernel); status != cudaSuccess)
    return status;
  *waits = attributes.ptxVersion >= 90;
#else
  static_cast<void>(kernel);
#endif
  return cudaSuccess;
}

// Nothing is launched for 0 blocks.
template <typename... Params, typename... Args>
Status launch(void (*kernel)(Params...), int64_t blocks, int threads, size_t shared_bytes,
              Stream stream, const Args&... args) {
  if (blocks == 0) return cudaSuccess;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  bool dependent = false;
  if (const Status status =
          waits_for_predecessor(reinterpret_cast<const void*>(kernel), &dependent);
      status != cudaSuccess)
    return status;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = dependent ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...);
}

}  // namespace powersgd::kernels::cuda
