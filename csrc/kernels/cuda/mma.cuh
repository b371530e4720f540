// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "kernels/cuda/launch.cuh"

// The instruction of the tensor cores that the kernels use, and the choice to use it.

namespace powersgd::kernels::cuda {

// POWERSGD_TENSOR_CORES=1 turns tensor cores on, and is read once. They are off otherwise, because
// no GPU has measured them yet. The variable must be equal on all ranks, whose outputs differ if
// not.
inline bool tensor_cores_wanted() {
  static const bool wanted = [] {
    const char* value = std::getenv("POWERSGD_TENSOR_CORES");
    return value != nullptr && value[0] == '1';
  }();
  return wanted;
}

// Says whether a kernel that needs tensor cores is to be used. Code for GPUs before Ampere has
// none, whatever device it runs on.
template <auto kKernel>
Status runs_on_tensor_cores(bool* runs) {
  *runs = false;
  if (!tensor_cores_wanted()) return cudaSuccess;
  int version = 0;
  const Status status = ptx_version<kKernel>(&version);
  *runs = version >= 80;
  return status;
}

// Rounds to 10 bits of mantissa, to nearest, and away from zero in the middle.
__device__ __forceinline__ uint32_t round_to_tf32([[maybe_unused]] float value) {
  uint32_t bits = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
#endif
  return bits;
}

// c += a b for a warp, as 16x8 += 16x8 8x8, of elements that round_to_tf32 has made.
__device__ __forceinline__ void mma([[maybe_unused]] float (&c)[4],
                                    [[maybe_unused]] const uint32_t (&a)[4],
                                    [[maybe_unused]] const uint32_t (&b)[2]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

}  // namespace powersgd::kernels::cuda
