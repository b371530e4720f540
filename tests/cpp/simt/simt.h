// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

// The runtime below include/cuda_runtime.h, on the CPU. Every CUDA thread is a fiber, so that
// barriers, shuffles and shared memory behave as on a GPU, and sanitizers see every access. Blocks
// run in a random order and several of them interleaved, so that a hidden dependence on scheduling
// shows. One launch runs to its end before launch() returns.
//
// An error that a GPU would report or hang at throws std::runtime_error from launch(): a thread
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

// Changes the order in which blocks and threads run. Any value will do; the default is 1.
void set_seed(uint64_t seed);
int64_t launch_count();  // since the program began
// The bytes that asynchronous copies have read from global memory since the program began.
int64_t async_copied_bytes();
void launch(const LaunchShape& shape, const std::function<void()>& thread_body);

Dim3 thread_index();
Dim3 block_index();
Dim3 block_size();
unsigned char* shared_memory();  // exactly shared_bytes, 16-byte aligned, filled with garbage

enum class WarpOp { kSync, kShuffle, kShuffleXor };

void yield();                   // lets other threads run, for a thread that waits for another block
int sync_block(int predicate);  // how many threads gave a non-zero predicate
uint64_t warp_exchange(WarpOp op, unsigned mask, uint64_t value, int operand);

// These order memory for ThreadSanitizer, see races.h.
void fence();
void order_update(const void* address);   // by an atomic operation that reads and writes
void order_acquire(const void* address);  // by a load

// An asynchronous copy is made as late as it may be. Floats that it overwrites are NaN until then.
void copy_async(void* to, const void* from, size_t bytes);
void commit_copies();
void await_copies(size_t groups_left);  // all but those of the last groups that were committed

}  // namespace simt
