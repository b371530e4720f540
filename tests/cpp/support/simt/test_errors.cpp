// SPDX-License-Identifier: BSD-3-Clause
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include "kernels/cuda/launch.cuh"
#include "powersgd/kernels.h"

namespace powersgd::kernels::cuda {
namespace {

void no_kernel(int) {}

TEST(Errors, AFailedLaunchHasANameAndDoesNotStick) {
  const Status status = launch(no_kernel, 1, 2048, 0, nullptr, 0);  // a block has 1024 threads
  EXPECT_STREQ(error_name(status), "cudaErrorInvalidConfiguration");
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

}  // namespace
}  // namespace powersgd::kernels::cuda
