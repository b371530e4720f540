// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "launch.cuh"
#include "tiles.h"

// Sums over the lanes of a warp and the threads of a block, in a fixed order.

namespace powersgd::kernels::cuda {

constexpr unsigned kAllLanes = 0xFFFFFFFFu;

// N sums per lane become sums over the warp, N a power of two. At each step a lane hands half of its
// values to its partner and keeps the other half, so that N values take about N shuffles, not 5 N.
// Afterwards lane l holds the values [l * N / 32, ...) in front, or, for N < 32, value l * N / 32.
template <int N, typename F>
__device__ __forceinline__ void reduce_lanes(F (&value)[N]) {
  const int lane = threadIdx.x % kWarpSize;
  POWERSGD_UNROLL
  for (int step = 0; step < 5; ++step) {
    const int distance = 16 >> step;
    if ((N >> step) > 1) {
      const bool upper = (lane & distance) != 0;
      POWERSGD_UNROLL
      for (int i = 0; i < (N >> step) / 2; ++i) {
        const F kept = upper ? value[i + (N >> step) / 2] : value[i];
        const F given = upper ? value[i] : value[i + (N >> step) / 2];
        value[i] = kept + __shfl_xor_sync(kAllLanes, given, distance);
      }
    } else {
      value[0] += __shfl_xor_sync(kAllLanes, value[0], distance);
    }
  }
}

// Writes the N sums that reduce_lanes left distributed over the lanes.
template <int N, typename F>
__device__ __forceinline__ void store_lane_sums(const F (&value)[N], F* out) {
  const int lane = threadIdx.x % kWarpSize;
  if constexpr (N >= kWarpSize) {
    POWERSGD_UNROLL
    for (int i = 0; i < N / kWarpSize; ++i) out[lane * (N / kWarpSize) + i] = value[i];
  } else {
    if (lane % (kWarpSize / N) == 0) out[lane / (kWarpSize / N)] = value[0];
  }
}

template <typename F>
__device__ __forceinline__ F warp_sum(F value) {
  F values[1] = {value};
  reduce_lanes(values);
  return values[0];
}

}  // namespace powersgd::kernels::cuda
