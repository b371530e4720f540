// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "simt/simt.h"

// The part of CUDA's header of this name that the kernels use, on the SIMT runtime. The build of
// powersgd_simt finds this folder before any other; the kernels themselves are unchanged.

// NOLINTBEGIN: the names below are CUDA's.
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __builtin_assume(condition) static_cast<void>(condition)
#define threadIdx (::simt::thread_index())
#define blockIdx (::simt::block_index())

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) double2 {
  double x, y;
};
struct alignas(8) ushort4 {
  unsigned short x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline double2 make_double2(double x, double y) { return {x, y}; }
inline ushort4 make_ushort4(unsigned short x, unsigned short y, unsigned short z,
                            unsigned short w) {
  return {x, y, z, w};
}

inline uint32_t __float_as_uint(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
inline float __uint_as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline void __syncthreads() { simt::sync_block(0); }
inline int __syncthreads_or(int predicate) { return simt::sync_block(predicate) != 0; }
inline void __syncwarp(unsigned mask = 0xFFFFFFFFu) {
  simt::warp_exchange(simt::WarpOp::kSync, mask, 0, 0);
}
template <typename T>
T simt_shuffle(simt::WarpOp op, unsigned mask, T value, int operand) {
  static_assert(sizeof(T) <= sizeof(uint64_t), "shuffles move at most 8 bytes");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = simt::warp_exchange(op, mask, bits, operand);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}
template <typename T>
T __shfl_sync(unsigned mask, T value, int lane) {
  return simt_shuffle(simt::WarpOp::kShuffle, mask, value, lane);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask) {
  return simt_shuffle(simt::WarpOp::kShuffleXor, mask, value, lane_mask);
}

inline double rsqrt(double value) { return 1 / std::sqrt(value); }

// Rounds toward zero.
inline float __double2float_rz(double value) {
  const float nearest = static_cast<float>(value);
  return std::fabs(nearest) > std::fabs(value) ? std::nextafter(nearest, 0.0f) : nearest;
}

inline bool __isGlobal(const void*) { return true; }
template <typename T>
T __ldcs(const T* address) {
  return *address;
}
template <typename T>
void __stwb(T* address, T value) {
  *address = value;
}
template <typename T>
void __stcs(T* address, T value) {
  *address = value;
}

inline void __threadfence() { simt::fence(); }
inline void __nanosleep(unsigned) { simt::yield(); }

// One fiber runs at a time and is only left at a barrier, a warp operation or __nanosleep. To
// ThreadSanitizer these are atomic nevertheless.
template <typename T, typename Update>
T simt_update(T* address, const Update& update) {
  simt::order_update(address);
  const T old = __atomic_load_n(address, __ATOMIC_RELAXED);
  __atomic_store_n(address, update(old), __ATOMIC_RELAXED);
  return old;
}
inline unsigned long long atomicAdd(unsigned long long* address, unsigned long long value) {
  return simt_update(address, [&](unsigned long long old) { return old + value; });
}
inline unsigned long long atomicExch(unsigned long long* address, unsigned long long value) {
  return simt_update(address, [&](unsigned long long) { return value; });
}
inline unsigned long long atomicMax(unsigned long long* address, unsigned long long value) {
  return simt_update(address, [&](unsigned long long old) { return value > old ? value : old; });
}
inline int atomicOr(int* address, int value) {
  return simt_update(address, [&](int old) { return old | value; });
}

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidConfiguration = 9 };
inline const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorInvalidConfiguration ? "cudaErrorInvalidConfiguration" : "cudaSuccess";
}
namespace simt {
inline cudaError_t last_error = cudaSuccess;  // of a launch; it stays until it is asked for
inline int64_t dependent_launches = 0;        // since the program began
}  // namespace simt
inline cudaError_t cudaGetLastError() {
  const cudaError_t error = simt::last_error;
  simt::last_error = cudaSuccess;
  return error;
}
using cudaStream_t = struct CUstream_st*;

// Nothing is captured: a launch runs at once.
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone };
inline cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3(unsigned x_size = 1) : x(x_size) {}
};

// Kernels count as compiled for Hopper, so that those that may wait for their predecessor are
// launched so. One launch ends before the next begins, and none has to wait.
struct cudaFuncAttributes {
  int ptxVersion;
};
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  attributes->ptxVersion = 90;
  return cudaSuccess;
}

enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
  cudaLaunchAttribute* attrs = nullptr;
  unsigned numAttrs = 0;
};

template <typename... Params, typename... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...),
                               Args&&... args) {
  constexpr size_t kSharedBytesWithoutOptIn = 48 * 1024;
  if (config->dynamicSmemBytes > kSharedBytesWithoutOptIn)
    return simt::last_error = cudaErrorInvalidConfiguration;
  simt::dependent_launches += config->numAttrs;
  simt::launch({config->gridDim.x, static_cast<int>(config->blockDim.x), config->dynamicSmemBytes},
               [&] { kernel(args...); });
  return cudaSuccess;
}
// NOLINTEND
