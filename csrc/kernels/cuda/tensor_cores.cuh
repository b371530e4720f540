// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "kernels/cuda/mma.cuh"

// Products of matrices in bfloat16, whose sums are float.
//
// The lanes of a warp hold fragments of the matrices. With g = lane / 4 and t = lane % 4, and pairs
// of elements that differ in the inner index:
//   - A, 16x16: (g, 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8), each with the element after it
//   - B, 16x8: (2t, g), (2t + 8, g), each with the element below it
//   - C, 16x8: (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1)
// A product may take its rows, columns and inner indices in any order, so each kernel chooses one
// in which a lane's elements lie side by side: four inner indices in a row are 2t, 2t + 1, 2t + 8
// and 2t + 9.

namespace powersgd::kernels::cuda {

constexpr int kInner = 16;  // columns of A

using FragmentA = uint32_t[4];
using FragmentB = uint32_t[2];
using FragmentC = float[4];

__device__ __forceinline__ int lane_group() {  // g
  return lane_id() / 4;
}
__device__ __forceinline__ int lane_in_group() {  // t
  return lane_id() % 4;
}

}  // namespace powersgd::kernels::cuda
