// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstddef>
#include <cstdint>

#include "powersgd/kernels.h"

// How kernels are launched, and the few names that depend on the compiler. The same .cu files are
// built by nvcc, and by a host compiler with -DPOWERSGD_SIMT after the header of the tests' SIMT
// runtime (tests/cpp/cuda.cmake).

#if defined(POWERSGD_SIMT)
#define POWERSGD_UNROLL
#define POWERSGD_UNROLL_4
#define POWERSGD_UNROLL_8
#define POWERSGD_NO_UNROLL
#define POWERSGD_NOINLINE __attribute__((noinline))
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#define POWERSGD_UNROLL _Pragma("unroll")
#define POWERSGD_UNROLL_4 _Pragma("unroll 4")
#define POWERSGD_UNROLL_8 _Pragma("unroll 8")
#define POWERSGD_NO_UNROLL _Pragma("unroll 1")
#define POWERSGD_NOINLINE __noinline__
#endif

// Programmatic dependent launch (Hopper): a kernel's blocks may be placed while its predecessor
// drains, and wait in begin_kernel() until that one has ended. 0 turns it off.
#ifndef POWERSGD_DEPENDENT_LAUNCH
#define POWERSGD_DEPENDENT_LAUNCH 1
#endif

namespace powersgd::kernels::cuda {

#if defined(POWERSGD_SIMT)

inline unsigned char* shared_memory() { return simt::shared_memory(); }
inline void begin_kernel() {}
template <typename T>
void forget(T& /*value*/) {}

template <typename... Params, typename... Args>
Status launch(void (*kernel)(Params...), int64_t blocks, int threads, size_t shared_bytes,
              Stream /*stream*/, const Args&... args) {
  if (blocks == 0) return 0;
  simt::launch({blocks, threads, shared_bytes}, [&] { kernel(args...); });
  return 0;
}

#else

__device__ __forceinline__ unsigned char* shared_memory() {
  extern __shared__ __align__(16) unsigned char dynamic_shared_memory[];
  return dynamic_shared_memory;
}

// Every kernel calls this before it touches memory.
__device__ __forceinline__ void begin_kernel() {
#if POWERSGD_DEPENDENT_LAUNCH && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  // The next kernel may be placed as soon as every block of this one has been; it waits in turn
  // until this one has ended, and so, since all blocks come by here, for all before it.
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The compiler takes the value for a new one. It keeps a loop from holding in registers what is
// cheap to compute or load again, such as the address of every row of every array.
__device__ __forceinline__ void forget(int64_t& value) { asm volatile("" : "+l"(value)); }
__device__ __forceinline__ void forget(int& value) { asm volatile("" : "+r"(value)); }

// Only code compiled for Hopper waits in begin_kernel(). What counts is what it was compiled
// for, not the device: code for an older one runs on a newer one.
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

#endif

}  // namespace powersgd::kernels::cuda
