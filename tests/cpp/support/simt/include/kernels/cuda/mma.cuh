// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "kernels/cuda/launch.cuh"
#include "support/simt/simt.h"

// In place of csrc/kernels/cuda/mma.cuh: the same instructions, with the roundings of a GPU.
namespace powersgd::kernels::cuda {

template <auto kKernel>
Status runs_on_tensor_cores(bool* runs) {
  *runs = simt::tensor_cores();
  return cudaSuccess;
}

// Half of the last kept bit carries into the kept ones.
inline uint32_t round_to_tf32(float value) {
  return (__float_as_uint(value) + 0x1000u) & 0xFFFFE000u;
}

// The products are exact in double, and the sum nearly so. It is then rounded toward zero.
inline void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  struct Operands {
    float a[16][8], b[8][8];
  };
  Operands own;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize, g = lane / 4, t = lane % 4;
  // The other lanes write to those of lane 0.
  Operands& all = *__shfl_sync(~0u, &own, 0);
  for (int i = 0; i < 4; ++i) all.a[g + i % 2 * 8][t + i / 2 * 4] = __uint_as_float(a[i]);
  for (int i = 0; i < 2; ++i) all.b[t + i * 4][g] = __uint_as_float(b[i]);
  __syncwarp();
  for (int i = 0; i < 4; ++i) {
    double sum = c[i];
    for (int k = 0; k < 8; ++k)
      sum += static_cast<double>(all.a[g + i / 2 * 8][k]) * all.b[k][2 * t + i % 2];
    c[i] = __double2float_rz(sum);
  }
  __syncwarp();
}

}  // namespace powersgd::kernels::cuda
