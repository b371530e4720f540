// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>

// The part of CUDA that the kernels use, on the CPU and for tests only: every CUDA thread is a
// fiber, so that barriers, shuffles and shared memory behave as on a GPU, and sanitizers see
// every access. Blocks run in a random order and several of them interleaved, so that a hidden
// dependence on scheduling shows. One launch runs to its end before launch() returns.
//
// What is an error on a GPU (or would hang it) throws std::runtime_error from launch(): a thread
// that ends while others wait at a barrier, a warp operation with an ended or absent lane, lanes
// that wait at different operations.

namespace simt {

struct Dim3 {
  unsigned x = 1, y = 1, z = 1;
};

struct LaunchShape {
  int64_t blocks;
  int threads;
  size_t shared_bytes;
};

// Changes the order in which blocks and threads run. Any value; the default is 1.
void set_seed(uint64_t seed);
int64_t launch_count();  // since the program began
void launch(const LaunchShape& shape, const std::function<void()>& thread_body);

const Dim3& thread_index();
const Dim3& block_index();
const Dim3& block_size();
const Dim3& grid_size();
unsigned char* shared_memory();  // exactly shared_bytes, 16-byte aligned, filled with garbage

enum class WarpOp { kSync, kShuffle, kShuffleXor, kShuffleDown, kBallot };

int sync_block(int predicate);  // how many threads gave a non-zero predicate
uint64_t warp_exchange(WarpOp op, unsigned mask, uint64_t value, int operand);

template <typename T>
T warp_shuffle(WarpOp op, unsigned mask, T value, int operand) {
  static_assert(sizeof(T) <= sizeof(uint64_t), "shuffles move at most 8 bytes");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = warp_exchange(op, mask, bits, operand);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

}  // namespace simt

// NOLINTBEGIN: the names below are CUDA's.
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define threadIdx (::simt::thread_index())
#define blockIdx (::simt::block_index())
#define blockDim (::simt::block_size())
#define gridDim (::simt::grid_size())

struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) double2 {
  double x, y;
};
struct alignas(8) ushort4 {
  unsigned short x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline double2 make_double2(double x, double y) { return {x, y}; }
inline ushort4 make_ushort4(unsigned short x, unsigned short y, unsigned short z,
                            unsigned short w) {
  return {x, y, z, w};
}

inline void __syncthreads() { simt::sync_block(0); }
inline int __syncthreads_or(int predicate) { return simt::sync_block(predicate) != 0; }
inline void __syncwarp(unsigned mask = 0xFFFFFFFFu) {
  simt::warp_exchange(simt::WarpOp::kSync, mask, 0, 0);
}
inline void __threadfence() {}
template <typename T>
T __shfl_sync(unsigned mask, T value, int lane) {
  return simt::warp_shuffle(simt::WarpOp::kShuffle, mask, value, lane);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask) {
  return simt::warp_shuffle(simt::WarpOp::kShuffleXor, mask, value, lane_mask);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, int delta) {
  return simt::warp_shuffle(simt::WarpOp::kShuffleDown, mask, value, delta);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  return static_cast<unsigned>(simt::warp_exchange(simt::WarpOp::kBallot, mask, predicate != 0, 0));
}

template <typename T>
T __ldg(const T* address) {
  return *address;
}
template <typename T>
T __ldcs(const T* address) {
  return *address;
}
template <typename T>
void __stcs(T* address, T value) {
  *address = value;
}
template <typename T>
void __stwb(T* address, T value) {
  *address = value;
}

// One fiber runs at a time and is only left at a barrier or a warp operation.
inline int atomicAdd(int* address, int value) {
  const int old = *address;
  *address += value;
  return old;
}
inline int atomicOr(int* address, int value) {
  const int old = *address;
  *address |= value;
  return old;
}
// NOLINTEND
