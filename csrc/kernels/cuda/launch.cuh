// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "kernels/cuda/block_tiles.h"
#include "kernels/cuda/shared_memory.cuh"
#include "powersgd/kernels/kernels.h"

// How kernels are launched, and the few things that depend on the compiler.

#define POWERSGD_UNROLL _Pragma("unroll")
#define POWERSGD_UNROLL_2 _Pragma("unroll 2")
#define POWERSGD_UNROLL_4 _Pragma("unroll 4")
#define POWERSGD_NO_UNROLL _Pragma("unroll 1")

namespace powersgd::kernels::cuda {

// Programmatic dependent launch (Hopper): a kernel's blocks may be placed while its predecessor
// drains. It is used only where the predecessor in the stream is a kernel of the same stage chain,
// never after a collective or an event. Both kernels take part:
//   - The predecessor calls allow_successor() in every block that does not end before.
//   - The successor calls wait_for_predecessor() before it reads what the predecessor writes.
__device__ __forceinline__ void allow_successor() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_predecessor() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Unsigned arithmetic takes half as many instructions.
__device__ __forceinline__ int lane_id() {
  return static_cast<int>(threadIdx.x % unsigned{kWarpSize});
}
__device__ __forceinline__ int warp_id() {
  return static_cast<int>(threadIdx.x / unsigned{kWarpSize});
}

// The compiler takes the value for a new one. A loop then recomputes or reloads what is cheap, such
// as the address of every row of every array, instead of holding it in registers.
__device__ __forceinline__ void hide_from_optimizer([[maybe_unused]] int& value) {
#if defined(__CUDA_ARCH__)
  asm volatile("" : "+r"(value));
#endif
}

inline std::atomic<int64_t> launches{0};  // of this process, see launch_count()

// Finds the architecture that the kernels of the current device were compiled for, such as 90. The
// device does not tell: code for an older one runs on a newer one. The driver is asked once per
// device.
Status find_code_version(int* version);

enum class Predecessor { kAnything, kAllowsSuccessor };

// Launches blocks of kThreads threads. Nothing is launched for 0 blocks.
template <auto kKernel, typename... Args>
Status launch(int64_t blocks, size_t shared_bytes, Stream stream, Predecessor predecessor,
              const Args&... args) {
  if (blocks == 0) return cudaSuccess;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  bool dependent = false;
  if (predecessor == Predecessor::kAllowsSuccessor) {
    int version = 0;
    const Status status = find_code_version(&version);
    if (status != cudaSuccess) return status;
    dependent = version >= 90;  // older code does not wait in wait_for_predecessor()
  }
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = dependent ? 1 : 0;
  ++launches;
  return cudaLaunchKernelEx(&config, kKernel, args...);
}

}  // namespace powersgd::kernels::cuda
