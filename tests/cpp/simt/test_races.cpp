// SPDX-License-Identifier: BSD-3-Clause
#include <cuda_pipeline_primitives.h>
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>

#include "kernels/cuda/grid.cuh"
#include "simt/simt.h"

// ThreadSanitizer finds the races of CUDA code, and no others. It reports a pair of lines of code
// once, so that each kernel below is instantiated for one test.

namespace powersgd::test {
namespace {

bool race_in(const simt::LaunchShape& shape, const std::function<void()>& kernel) {
  testing::internal::CaptureStderr();
  std::string error;
  try {
    simt::launch(shape, kernel);
  } catch (const std::runtime_error& thrown) {
    error = thrown.what();
  }
  const std::string report = testing::internal::GetCapturedStderr();
  if (error.empty()) return false;
  EXPECT_EQ(error, "simt: ThreadSanitizer reports a race");
  EXPECT_NE(report.find("data race"), std::string::npos);
  return true;
}

// The value is read, whatever becomes of it.
template <typename T>
void use(T value) {
  asm volatile("" : : "r"(value));
}

// Each thread writes an element of shared memory, and reads that of another.
template <class Wait>
bool race_in_exchange(unsigned distance, const Wait& wait) {
  return race_in({2, 64, 64 * sizeof(unsigned)}, [&] {
    auto* const shared = reinterpret_cast<unsigned*>(simt::shared_memory());
    shared[threadIdx.x] = threadIdx.x;
    wait();
    use(shared[threadIdx.x ^ distance]);
  });
}

TEST(Races, BarrierOrdersABlock) {
  EXPECT_FALSE(race_in_exchange(32, [] { __syncthreads(); }));
  EXPECT_FALSE(race_in_exchange(32, [] { __syncthreads_or(0); }));
  EXPECT_TRUE(race_in_exchange(32, [] { __syncwarp(); }));
}

TEST(Races, SyncwarpOrdersTheLanesOfItsMask) {
  EXPECT_FALSE(race_in_exchange(16, [] { __syncwarp(); }));
  EXPECT_FALSE(race_in_exchange(8, [] { __syncwarp(0xFFFFu << threadIdx.x / 16 % 2 * 16); }));
  EXPECT_TRUE(race_in_exchange(16, [] { __syncwarp(0xFFFFu << threadIdx.x / 16 % 2 * 16); }));
}

TEST(Races, ShuffleOrdersNothing) {
  EXPECT_TRUE(race_in_exchange(16, [] { __shfl_xor_sync(~0u, 1, 16); }));
}

TEST(Races, BarrierAlsoOrdersWhatComesAfter) {
  const auto reuse = [](const auto& wait) {
    return race_in({1, 64, 64 * sizeof(unsigned)}, [&] {
      auto* const shared = reinterpret_cast<unsigned*>(simt::shared_memory());
      for (unsigned i = 0; i < 3; ++i) {
        shared[threadIdx.x] = i;
        __syncthreads();
        use(shared[63 - threadIdx.x]);
        wait();
      }
    });
  };
  EXPECT_FALSE(reuse([] { __syncthreads(); }));
  EXPECT_TRUE(reuse([] {}));
}

// The last thread of block 0 writes a result, which thread 0 then posts. Thread 0 of block 1 awaits
// that, and the block reads the result.
template <class Post, class Await>
bool race_in_message(const Post& post_result, const Await& await_post) {
  uint64_t counter = 0;
  int result = 0;
  return race_in({2, 64, 0}, [&] {
    if (blockIdx.x == 0) {
      if (threadIdx.x == 63) result = 1;
      __syncthreads();
      if (threadIdx.x == 0) post_result(&counter, &result);
    } else {
      if (threadIdx.x == 0) await_post(&counter);
      __syncthreads();
      use(result);
    }
  });
}

using kernels::cuda::increment;
using kernels::cuda::load_acquire;

constexpr auto kFencedPost = [](uint64_t* counter, int*) {
  __threadfence();
  increment(counter);
};
constexpr auto kAcquire = [](const uint64_t* counter) {
  while (load_acquire(counter) == 0) __nanosleep(32);
};
uint64_t look(uint64_t* counter) {
  return atomicAdd(reinterpret_cast<unsigned long long*>(counter), 0ull);
}

TEST(Races, FenceAndAtomicReachALoadThatAcquires) {
  EXPECT_FALSE(race_in_message(kFencedPost, kAcquire));
  EXPECT_TRUE(race_in_message([](uint64_t* counter, int*) { increment(counter); }, kAcquire));
}

TEST(Races, FenceAndAtomicReachAnAtomicAndFence) {
  EXPECT_FALSE(race_in_message(kFencedPost, [](uint64_t* counter) {
    while (look(counter) == 0) __nanosleep(32);
    __threadfence();
  }));
  EXPECT_TRUE(race_in_message(kFencedPost, [](uint64_t* counter) {
    while (look(counter) == 0) __nanosleep(32);
  }));
  EXPECT_TRUE(race_in_message(kFencedPost, [](uint64_t* counter) {
    __threadfence();
    while (look(counter) == 0) __nanosleep(32);
  }));
}

TEST(Races, FenceDoesNotReleaseWhatComesAfter) {
  EXPECT_TRUE(race_in_message(
      [](uint64_t* counter, int* result) {
        __threadfence();
        *result = 1;
        increment(counter);
      },
      kAcquire));
}

TEST(Races, PlainLoadOfACounterRaces) {
  EXPECT_TRUE(race_in_message(kFencedPost, [](const uint64_t* counter) {
    while (*counter == 0) __nanosleep(32);
    __threadfence();
  }));
}

TEST(Races, BlocksOfALaunchAreNotOrdered) {
  int value = 0;
  EXPECT_FALSE(race_in({9, 32, 0}, [&] { atomicOr(&value, 1); }));
  EXPECT_FALSE(race_in({9, 32, 0}, [&] { *static_cast<volatile int*>(&value) = 1; }));
  EXPECT_FALSE(race_in({1, 1, 0}, [&] { value = 1; }));  // nor do launches race with each other
  EXPECT_TRUE(race_in({2, 1, 0}, [&] { value = 1; }));
}

TEST(Races, TheWaysOfGridWaitForEachOther) {
  constexpr int kBlocks = 7;
  uint64_t counters[3] = {};
  unsigned results[kBlocks] = {}, sum = 0;
  EXPECT_FALSE(race_in({2 * kBlocks, 64, sizeof(kernels::cuda::Ticket)}, [&] {
    auto* const shared = reinterpret_cast<kernels::cuda::Ticket*>(simt::shared_memory());
    const auto ticket = kernels::cuda::take_ticket(&counters[0], 2 * kBlocks, shared);
    if (ticket.order < kBlocks) {
      if (threadIdx.x == 63) results[ticket.order] = 1;
      kernels::cuda::post(&counters[1]);
      return;
    }
    kernels::cuda::await(&counters[1], kBlocks);
    if (threadIdx.x == 63) ++results[ticket.order - kBlocks];
    if (!kernels::cuda::is_last_to_arrive(&counters[2], kBlocks) || threadIdx.x != 1) return;
    for (const unsigned result : results) sum += result;
  }));
  EXPECT_EQ(sum, 2u * kBlocks);
}

// Threads copy, and read what others have copied.
template <class Wait>
bool race_in_copy(const Wait& wait) {
  unsigned from[64] = {};
  return race_in({1, 64, 64 * sizeof(unsigned)}, [&] {
    auto* const shared = reinterpret_cast<unsigned*>(simt::shared_memory());
    __pipeline_memcpy_async(shared + threadIdx.x, from + threadIdx.x, sizeof(unsigned));
    __pipeline_commit();
    wait();
    from[threadIdx.x] = shared[63 - threadIdx.x];
    __pipeline_wait_prior(0);
  });
}

TEST(Races, AsyncCopyIsAWriteUntilItIsWaitedFor) {
  EXPECT_FALSE(race_in_copy([] {
    __pipeline_wait_prior(0);
    __syncthreads();
  }));
  EXPECT_TRUE(race_in_copy([] { __pipeline_wait_prior(0); }));
  EXPECT_TRUE(race_in_copy([] { __syncthreads(); }));
  EXPECT_TRUE(race_in_copy([] {
    __syncthreads();
    __pipeline_wait_prior(0);
  }));
}

}  // namespace
}  // namespace powersgd::test
