// SPDX-License-Identifier: BSD-3-Clause
#include <cuda_pipeline_primitives.h>
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "simt/simt.h"
#include "support/errors.h"

namespace powersgd::test {
namespace {

void expect_error(const std::string& part, const simt::LaunchShape& shape,
                  const std::function<void()>& body) {
  const std::string error = error_of([&] { simt::launch(shape, body); });
  EXPECT_TRUE(contains(error, part)) << error;
}

TEST(Simt, EveryThreadOfEveryBlockRunsOnce) {
  std::vector<int> runs(7 * 70, 0);
  simt::launch({7, 70, 0}, [&] { ++runs[blockIdx.x * simt::block_size().x + threadIdx.x]; });
  EXPECT_EQ(runs, std::vector<int>(runs.size(), 1));
}

TEST(Simt, BarriersOrderSharedMemory) {
  std::vector<int> sums(5, 0);
  simt::launch({5, 96, 96 * sizeof(int)}, [&] {
    int* const shared = reinterpret_cast<int*>(simt::shared_memory());
    const int thread = static_cast<int>(threadIdx.x);
    shared[thread] = thread;
    for (int half = 48; half >= 3; half /= 2) {
      __syncthreads();
      if (thread < half) shared[thread] += shared[thread + half];
    }
    __syncthreads();
    if (thread == 0) sums[blockIdx.x] = shared[0] + shared[1] + shared[2];
  });
  EXPECT_EQ(sums, std::vector<int>(5, 95 * 96 / 2));
}

TEST(Simt, WarpOperations) {
  simt::launch({2, 64, 0}, [] {
    const int lane = static_cast<int>(threadIdx.x % 32);
    EXPECT_EQ(__shfl_xor_sync(~0u, lane, 5), lane ^ 5);
    EXPECT_EQ(__shfl_xor_sync(~0u, 2.5 * lane, 5), 2.5 * (lane ^ 5));
    if (lane < 8) {
      EXPECT_EQ(__shfl_xor_sync(0xFFu, lane, 1), lane ^ 1);
    }
    EXPECT_EQ(__syncthreads_or(threadIdx.x == 40), 1);
    EXPECT_EQ(__syncthreads_or(0), 0);
  });
}

TEST(Simt, OrdersDifferBySeedAndBlocksInterleave) {
  std::set<std::vector<unsigned>> orders;
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    std::vector<unsigned> order(24);
    unsigned long long next = 0;
    simt::set_seed(seed * 1000);
    simt::launch({8, 32, 0}, [&] {
      for (int i = 0; i < 3; ++i) {
        if (threadIdx.x == 0) order.at(atomicAdd(&next, 1)) = blockIdx.x;
        __syncthreads();
      }
    });
    bool contiguous = true;
    for (size_t i = 0; i < order.size(); i += 3) contiguous &= order[i] == order[i + 2];
    EXPECT_FALSE(contiguous);
    orders.insert(order);
  }
  EXPECT_EQ(orders.size(), 4u);
}

TEST(Simt, MissedBarrierIsAnError) {
  expect_error("63 wait at __syncthreads", {1, 64, 0}, [] {
    if (threadIdx.x != 3) __syncthreads();
  });
}

TEST(Simt, WarpOperationWithAnEndedLaneIsAnError) {
  expect_error("has ended", {1, 32, 0}, [] {
    if (threadIdx.x != 31) __shfl_xor_sync(~0u, 1, 1);
  });
  expect_error("does not exist", {1, 16, 0}, [] { __syncwarp(); });
}

TEST(Simt, LanesAtDifferentOperationsAreAnError) {
  expect_error("is stuck", {1, 32, 0}, [] {
    if (threadIdx.x < 16)
      __shfl_xor_sync(~0u, 1, 1);
    else
      __syncthreads();
  });
  expect_error("does not take part", {1, 32, 0},
               [] { __shfl_xor_sync(0xFFFFu << 16 * (threadIdx.x / 16), 1, 16); });
}

TEST(Simt, ErrorsInDeviceCodeReachTheCaller) {
  expect_error("from a thread", {3, 32, 0}, [] { throw std::runtime_error("from a thread"); });
  simt::launch({1, 32, 0}, [] { __syncthreads(); });  // and the next launch works
}

TEST(Simt, AsyncCopiesAreMadeAsLateAsTheyMayBe) {
  float from[3] = {1, 2, 3}, to[3] = {};
  simt::launch({1, 1, 0}, [&] {
    for (int i = 0; i < 3; ++i) {
      __pipeline_memcpy_async(&to[i], &from[i], sizeof(float));
      if (i < 2) __pipeline_commit();
    }
    for (const float value : to) EXPECT_TRUE(std::isnan(value));
    from[0] = 10;
    __pipeline_wait_prior(1);
    EXPECT_EQ(to[0], 10);
    EXPECT_TRUE(std::isnan(to[1]));
    __pipeline_wait_prior(0);
    EXPECT_EQ(to[1], 2);
    EXPECT_TRUE(std::isnan(to[2]));  // it has not been committed
    __pipeline_commit();
    __pipeline_wait_prior(0);
    EXPECT_EQ(to[2], 3);
  });
}

TEST(Simt, AsyncCopyThatIsNotWaitedForIsAnError) {
  float from = 1, to = 0;
  expect_error("has not waited", {1, 1, 0}, [&] {
    __pipeline_memcpy_async(&to, &from, sizeof(float));
    __pipeline_commit();
  });
}

#if defined(__SANITIZE_ADDRESS__)
TEST(SimtDeathTest, SharedMemoryEndsWhereItEnds) {
  EXPECT_DEATH(simt::launch({1, 32, 64}, [] { simt::shared_memory()[64] = 1; }),
               "heap-buffer-overflow");
}
#endif

}  // namespace
}  // namespace powersgd::test
