// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cmath>

#include "kernels/cuda/elements.cuh"
#include "simt/simt.h"

// Instead of csrc/kernels/cuda/mma.cuh: the same instructions, with the roundings of a GPU.
namespace powersgd::kernels::cuda {

inline Status takes_bfloat16_products(const Bucket& bucket, bool* takes) {
  *takes = bucket.bfloat16_products;
  return cudaSuccess;
}

inline uint32_t pack_bfloat16(float first, float second) {
  const auto bits = [](float value) {
    if (!std::isnan(value)) value = clamp_to(value, kLargestBfloat16);
    return uint32_t{float_to_bfloat16(value)};
  };
  return bits(first) | bits(second) << 16;
}

// The products are exact in double, and the sum nearly so. It is then rounded toward zero.
inline void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  struct Operands {
    float a[16][16], b[16][8];
  };
  Operands own;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize, g = lane / 4, t = lane % 4;
  const auto element = [](const uint32_t* pairs, int i) {
    return __uint_as_float(pairs[i / 2] >> i % 2 * 16 << 16);
  };
  // The other lanes write to those of lane 0.
  Operands& all = *__shfl_sync(~0u, &own, 0);
  for (int i = 0; i < 8; ++i) all.a[g + i / 2 % 2 * 8][2 * t + i % 2 + i / 4 * 8] = element(a, i);
  for (int i = 0; i < 4; ++i) all.b[2 * t + i % 2 + i / 2 * 8][g] = element(b, i);
  __syncwarp();
  for (int i = 0; i < 4; ++i) {
    double sum = c[i];
    for (int k = 0; k < 16; ++k)
      sum += static_cast<double>(all.a[g + i / 2 * 8][k]) * all.b[k][2 * t + i % 2];
    c[i] = __double2float_rz(sum);
  }
  __syncwarp();
}

}  // namespace powersgd::kernels::cuda
