// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "kernels/cuda/launch.cuh"

// The instructions of the tensor cores that the kernels use.

namespace powersgd::kernels::cuda {

// Says whether a bucket takes the products that are rounded to bfloat16. Code for GPUs before
// Ampere has none, whatever device it runs on.
inline Status takes_bfloat16_products(const Bucket& bucket, bool* takes) {
  *takes = false;
  if (!bucket.bfloat16_products) return cudaSuccess;
  int version = 0;
  const Status status = find_code_version(&version);
  *takes = version >= 80;
  return status;
}

// Two numbers, rounded to nearest, the first in the lower half. What would round to infinity
// becomes the largest bfloat16, as M may be as large as a float can be.
__device__ __forceinline__ uint32_t pack_bfloat16([[maybe_unused]] float first,
                                                  [[maybe_unused]] float second) {
  uint32_t pair = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("cvt.rn.satfinite.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
#endif
  return pair;
}

// c += a b for a warp, as 16x8 += 16x16 16x8. See tensor_cores.cuh.
__device__ __forceinline__ void mma([[maybe_unused]] float (&c)[4],
                                    [[maybe_unused]] const uint32_t (&a)[4],
                                    [[maybe_unused]] const uint32_t (&b)[2]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

}  // namespace powersgd::kernels::cuda
