// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "kernels/cuda/block_tiles.h"
#include "kernels/cuda/launch.cuh"

// Sums over the lanes of a warp and the threads of a block, in a fixed order.

namespace powersgd::kernels::cuda {

constexpr unsigned kAllLanes = 0xFFFFFFFFu;

// N sums per lane become sums over the warp, N a power of two. At each step a lane hands half of
// its values to its partner and keeps the other half, so N values take about N shuffles, not 5 N.
// Afterwards lane l holds the values [l * N / 32, ...) in front, or, for N < 32, value l * N / 32.
template <int kCount, int kDistance, int N, typename F>
__device__ __forceinline__ void reduce_lanes_from(F (&value)[N]) {
  if constexpr (kCount > 1) {
    constexpr int kHalf = kCount / 2;
    const bool upper = (threadIdx.x & kDistance) != 0;
    POWERSGD_UNROLL
    for (int i = 0; i < kHalf; ++i) {
      const F kept = upper ? value[i + kHalf] : value[i];
      const F given = upper ? value[i] : value[i + kHalf];
      value[i] = kept + __shfl_xor_sync(kAllLanes, given, kDistance);
    }
  } else {
    value[0] += __shfl_xor_sync(kAllLanes, value[0], kDistance);
  }
  if constexpr (kDistance > 1)
    reduce_lanes_from<(kCount > 1 ? kCount / 2 : 1), kDistance / 2>(value);
}

template <int N, typename F>
__device__ __forceinline__ void reduce_lanes(F (&value)[N]) {
  reduce_lanes_from<N, kWarpSize / 2>(value);
}

// Calls visit(index, sum) for each of the N sums, on the lane that reduce_lanes left it with.
template <int N, typename F, typename Visit>
__device__ __forceinline__ void visit_lane_sums(const F (&value)[N], const Visit& visit) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  if constexpr (N >= kWarpSize) {
    POWERSGD_UNROLL
    for (int i = 0; i < N / kWarpSize; ++i) visit(lane * (N / kWarpSize) + i, value[i]);
  } else {
    if (lane % (kWarpSize / N) == 0) visit(lane / (kWarpSize / N), value[0]);
  }
}

template <typename F>
__device__ __forceinline__ F warp_sum(F value) {
  F values[1] = {value};
  reduce_lanes(values);
  return values[0];
}

}  // namespace powersgd::kernels::cuda
