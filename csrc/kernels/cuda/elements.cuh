// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cfloat>
#include <cstdint>

#include "kernels/cuda/block_tiles.h"
#include "kernels/cuda/launch.cuh"

// Elements as memory holds them, and as the kernels compute with them.
//
// Storage is float, or uint16_t for both 16-bit types. A DType, the same for a whole
// launch, says at run time which of the two it is. That halves the number of kernels. Loops branch
// on it once for several elements, in with_dtype().

namespace powersgd::kernels::cuda {

__device__ __forceinline__ uint32_t float_bits(float value) { return __float_as_uint(value); }
__device__ __forceinline__ float half_to_float(uint16_t bits) {
  return __half2float(__ushort_as_half(bits));
}
__device__ __forceinline__ uint16_t float_to_half(float value) {
  return __half_as_ushort(__float2half_rn(value));
}
__device__ __forceinline__ float bfloat16_to_float(uint16_t bits) {
  return __uint_as_float(static_cast<uint32_t>(bits) << 16);
}
__device__ __forceinline__ uint16_t float_to_bfloat16(float value) {
  return __bfloat16_as_ushort(__float2bfloat16_rn(value));
}

__device__ __forceinline__ float widen(float value, DType) { return value; }
__device__ __forceinline__ float widen(uint16_t value, DType dtype) {
  return dtype == DType::kBFloat16 ? bfloat16_to_float(value) : half_to_float(value);
}

template <typename Storage>
__device__ __forceinline__ Storage narrow(float value, DType dtype) {
  if constexpr (sizeof(Storage) == 2)
    return dtype == DType::kBFloat16 ? float_to_bfloat16(value) : float_to_half(value);
  else
    return value;
}

// Calls body(dtype), in which the compiler knows the dtype.
template <typename Storage, typename Body>
__device__ __forceinline__ void with_dtype(DType dtype, const Body& body) {
  if (sizeof(Storage) > 2 || dtype == DType::kBFloat16)
    body(sizeof(Storage) > 2 ? DType::kFloat32 : DType::kBFloat16);
  else
    body(DType::kFloat16);
}

__device__ __forceinline__ bool is_finite(float value) { return fabsf(value) <= FLT_MAX; }
__device__ __forceinline__ bool is_finite(double value) { return fabs(value) <= DBL_MAX; }

__device__ __forceinline__ void replace_non_finite(float (&value)[4]) {
  POWERSGD_UNROLL
  for (int j = 0; j < 4; ++j) value[j] = is_finite(value[j]) ? value[j] : 0.0f;
}

// The dtype of a memory with this storage.
template <typename Storage>
constexpr DType kMemoryDType = sizeof(Storage) == 2 ? DType::kBFloat16 : DType::kFloat32;

constexpr float kLargestBfloat16 = 3.38953139e38f;

// The largest finite value of memory. It is kept within it, because an infinity would stay there.
template <typename Storage>
constexpr float kLargestInMemory = sizeof(Storage) == 2 ? kLargestBfloat16 : FLT_MAX;

__device__ __forceinline__ float clamp_to(float value, float limit) {
  return fminf(fmaxf(value, -limit), limit);
}

// Single elements of any type, on the rare paths.
__device__ inline float load_any(const void* base, int64_t index, DType dtype) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(base)[index];
  return widen(static_cast<const uint16_t*>(base)[index], dtype);
}
__device__ inline void store_any(void* base, int64_t index, float value, DType dtype) {
  if (dtype == DType::kFloat32)
    static_cast<float*>(base)[index] = value;
  else
    static_cast<uint16_t*>(base)[index] = narrow<uint16_t>(value, dtype);
}

// Promises the compiler that a pointer points to global memory. It cannot know that of a pointer
// from a table.
template <typename T>
__device__ __forceinline__ T* global(T* pointer) {
  __builtin_assume(__isGlobal(pointer));
  return pointer;
}

// Elements that this kernel or the next one needs again soon are accessed with kReuse, so that they
// stay in the caches. Those in shared memory are accessed with kShared.
enum class Access { kShared, kReuse, kNonTemporal };

template <Access kAccess, typename Vector>
__device__ __forceinline__ Vector load_vector(const void* address) {
  const Vector* vector = static_cast<const Vector*>(address);
  if constexpr (kAccess == Access::kNonTemporal) return __ldcs(vector);
  return *vector;
}
template <Access kAccess, typename Vector>
__device__ __forceinline__ void store_vector(void* address, Vector value) {
  Vector* vector = static_cast<Vector*>(address);
  if constexpr (kAccess == Access::kShared) *vector = value;
  // By an intrinsic, because nvcc splits many plain stores.
  if constexpr (kAccess == Access::kReuse) __stwb(vector, value);
  if constexpr (kAccess == Access::kNonTemporal) __stcs(vector, value);
}

// A lane's columns, four adjacent ones.
template <Access kAccess>
__device__ __forceinline__ void load_stored(const float* address, float (&out)[4]) {
  const float4 v = load_vector<kAccess, float4>(address);
  out[0] = v.x, out[1] = v.y, out[2] = v.z, out[3] = v.w;
}
template <Access kAccess>
__device__ __forceinline__ void load_stored(const uint16_t* address, uint16_t (&out)[4]) {
  const ushort4 v = load_vector<kAccess, ushort4>(address);
  out[0] = v.x, out[1] = v.y, out[2] = v.z, out[3] = v.w;
}
template <Access kAccess>
__device__ __forceinline__ void store_stored(float* address, const float (&in)[4]) {
  store_vector<kAccess>(address, make_float4(in[0], in[1], in[2], in[3]));
}
template <Access kAccess>
__device__ __forceinline__ void store_stored(uint16_t* address, const uint16_t (&in)[4]) {
  store_vector<kAccess>(address, make_ushort4(in[0], in[1], in[2], in[3]));
}

template <typename Storage>
__device__ __forceinline__ void widen_columns(const Storage (&in)[4], DType dtype,
                                              float (&out)[4]) {
  POWERSGD_UNROLL
  for (int j = 0; j < 4; ++j) out[j] = widen(in[j], dtype);
}
template <typename Storage>
__device__ __forceinline__ void narrow_columns(const float (&in)[4], DType dtype,
                                               Storage (&out)[4]) {
  POWERSGD_UNROLL
  for (int j = 0; j < 4; ++j) out[j] = narrow<Storage>(in[j], dtype);
}

// Which of a lane's four columns exist, and whether vector accesses reach them.
struct LaneColumns {
  bool aligned;
  int count;       // of all columns from the lane's first on
  int stride = 1;  // from one of the lane's columns to the next; 1 if aligned
};

// The same for columns that may be unaligned, or beyond the last, which then count as 0. An aligned
// row has all four.
template <Access kAccess, typename Storage>
__device__ __forceinline__ void load_stored(const Storage* address, const LaneColumns& columns,
                                            Storage (&out)[4]) {
  if (columns.aligned) {
    load_stored<kAccess>(address, out);
  } else {
    POWERSGD_UNROLL
    for (int j = 0; j < 4; ++j) {
      const int i = j * columns.stride;
      out[j] = i < columns.count ? load_vector<kAccess, Storage>(address + i) : Storage{0};
    }
  }
}
template <Access kAccess, typename Storage>
__device__ __forceinline__ void load_columns(const Storage* address, const LaneColumns& columns,
                                             DType dtype, float (&out)[4]) {
  Storage stored[4];
  load_stored<kAccess>(address, columns, stored);
  widen_columns(stored, dtype, out);
}
template <Access kAccess, typename Storage>
__device__ __forceinline__ void store_stored(Storage* address, const LaneColumns& columns,
                                             const Storage (&in)[4]) {
  if (columns.aligned) {
    store_stored<kAccess>(address, in);
  } else {
    POWERSGD_UNROLL
    for (int j = 0; j < 4; ++j) {
      const int i = j * columns.stride;
      if (i < columns.count) store_vector<kAccess>(address + i, in[j]);
    }
  }
}
template <Access kAccess, typename Storage>
__device__ __forceinline__ void store_columns(Storage* address, const LaneColumns& columns,
                                              DType dtype, const float (&in)[4]) {
  Storage stored[4];
  with_dtype<Storage>(dtype, [&](DType known) { narrow_columns(in, known, stored); });
  store_stored<kAccess>(address, columns, stored);
}

// True if the rows of a matrix at this address can be accessed four elements at a time.
template <typename Storage>
__device__ __forceinline__ bool is_aligned(const Storage* base, int64_t cols) {
  constexpr uint32_t kBytes = 4 * sizeof(Storage);
  const auto address = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(base));
  return (static_cast<uint32_t>(cols) % 4 | address % kBytes) == 0;
}

}  // namespace powersgd::kernels::cuda
