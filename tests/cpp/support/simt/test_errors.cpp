// SPDX-License-Identifier: BSD-3-Clause
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include "kernels/cuda/launch.cuh"
#include "powersgd/kernels.h"

namespace powersgd::kernels::cuda {
namespace {

void no_kernel(int) {}

TEST(Errors, AFailedLaunchHasANameAndDoesNotStick) {
  const size_t too_much = 49 * 1024;  // of shared memory, without asking for more first
  const Status status = launch<no_kernel>(1, too_much, nullptr, Predecessor::kAnything, 0);
  EXPECT_STREQ(error_name(status), "cudaErrorInvalidConfiguration");
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

}  // namespace
}  // namespace powersgd::kernels::cuda
