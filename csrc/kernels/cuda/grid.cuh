// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/load_acquire.cuh"

// How the blocks of one launch wait for each other, without a further launch.
//
// Both ways count in Bucket::counters, which need no launch of their own to be set back.
//   - The last of several blocks to arrive goes on with their joint result.
//   - Blocks take tickets when they start, and wait only for blocks of smaller tickets. Those run
//     already, so no order in which a device places blocks can make them wait forever.

namespace powersgd::kernels::cuda {

// Adds and returns the value before.
__device__ __forceinline__ uint64_t increment(uint64_t* counter, uint64_t by = 1) {
  static_assert(sizeof(unsigned long long) == sizeof(uint64_t));
  return atomicAdd(reinterpret_cast<unsigned long long*>(counter),
                   static_cast<unsigned long long>(by));
}

__device__ __forceinline__ void raise_to(uint64_t* counter, uint64_t value) {
  atomicMax(reinterpret_cast<unsigned long long*>(counter), static_cast<unsigned long long>(value));
}

// All threads of a block call it, each block once per launch, and arrive for `arrivals` of `all`.
// Returns true to the threads of the block that comes last, which then sees what the others wrote
// before. It sets the counter back: a remainder of 64 bits would take longer than the fences.
__device__ __forceinline__ bool is_last_to_arrive(uint64_t* counter, uint64_t all,
                                                  uint64_t arrivals = 1) {
  __syncthreads();
  bool last = false;
  if (threadIdx.x == 0) {
    __threadfence();
    last = increment(counter, arrivals) + arrivals == all;
    __threadfence();
    if (last) atomicExch(reinterpret_cast<unsigned long long*>(counter), 0ull);
  }
  return __syncthreads_or(last) != 0;
}

// Loads what another block may have written since this one last looked.
__device__ __forceinline__ int32_t load_again(const int32_t* address) {
  return *static_cast<const volatile int32_t*>(address);
}

// The order in which a block has started, among those of its launch and among all launches.
struct Ticket {
  uint64_t launch;
  int32_t order;
};

// All threads call it, once. `ticket` lies in shared memory. The counter holds the order in its
// lower half and the launch in the upper one. The last block of a launch goes on to the next, which
// begins when this one has ended.
__device__ __forceinline__ Ticket take_ticket(uint64_t* counter, int32_t blocks, Ticket* ticket) {
  if (threadIdx.x == 0) {
    const uint64_t number = increment(counter);
    ticket->launch = number >> 32;
    ticket->order = static_cast<int32_t>(number);
    if (ticket->order == blocks - 1)
      increment(counter, (uint64_t{1} << 32) - static_cast<uint64_t>(blocks));
  }
  __syncthreads();
  return *ticket;
}

// Tells await() that this block has written its result. All threads call it. It may count as more
// than one post.
__device__ __forceinline__ void post(uint64_t* counter, uint64_t count = 1) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  release_fence();
  increment(counter, count);
}

// Waits for `count` posts. All threads call it, and then see what was written before them.
__device__ __forceinline__ void await(const uint64_t* counter, uint64_t count) {
  if (threadIdx.x == 0) {
    while (load_acquire(counter) < count) __nanosleep(32);
  }
  __syncthreads();
}

}  // namespace powersgd::kernels::cuda
