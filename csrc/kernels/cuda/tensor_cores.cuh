// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "kernels/cuda/elements.cuh"
#include "kernels/cuda/mma.cuh"

// Products of float matrices on tensor cores, which multiply numbers of 11 bits (tf32).
//
// Each element is split into the sum of two such numbers, and a product takes three instructions.
// The rest is left out, which is below 2^-21 of the product of the magnitudes.
//
// The lanes of a warp hold fragments of the matrices. With g = lane / 4 and t = lane % 4:
//   - A, 16x8: elements (g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4)
//   - B, 8x8: elements (t, g), (t + 4, g)
//   - C, 16x8: elements (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1)
// A product may take its rows, columns and inner indices in any order, so that a lane finds what it
// needs side by side.

namespace powersgd::kernels::cuda {

constexpr int kInner = 8;  // columns of A

__device__ __forceinline__ int lane_group() {  // g
  return static_cast<int>(threadIdx.x) % kWarpSize / 4;
}
__device__ __forceinline__ int lane_in_group() {  // t
  return static_cast<int>(threadIdx.x) % 4;
}

// A lane's N elements of A or B, as the sums of two numbers.
template <int N>
struct Fragment {
  uint32_t high[N], low[N];

  __device__ __forceinline__ void set(int i, float value) {
    // A larger number would become an infinity. M may be as large as a float can be.
    constexpr float kLargest = 0x1.ffcp127f;
    value = clamp_to(value, kLargest);
    high[i] = round_to_tf32(value);
    low[i] = round_to_tf32(value - __uint_as_float(high[i]));
  }
};
using FragmentA = Fragment<4>;
using FragmentB = Fragment<2>;
using FragmentC = float[4];

// c += a b. All lanes of the warp call it. The instructions round toward zero, so that a long chain
// of them would lose accuracy. An addition rounds to nearest.
__device__ __forceinline__ void multiply_add(FragmentC& c, const FragmentA& a, const FragmentB& b) {
  FragmentC product = {};
  mma(product, a.high, b.low);
  mma(product, a.low, b.high);
  mma(product, a.high, b.high);
  POWERSGD_UNROLL
  for (int i = 0; i < 4; ++i) c[i] += product[i];
}

}  // namespace powersgd::kernels::cuda
