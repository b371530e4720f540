// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "kernels/cuda/launch.cuh"
#include "kernels/shared/layout.h"

namespace powersgd::kernels::cuda {

// The elements that a warp has in shared memory at a time: a row per lane. A gap follows every
// kWarpSize elements, so that the lanes find their rows in different banks.
template <int R>
constexpr int kStagedElements = R * (kWarpSize + 1);

// A warp's rows of a tile on their way through shared memory: to global memory neighboring lanes
// access neighboring elements, where a lane per row would touch a line per lane.
template <int R>
class StagedRows {
 public:
  // `staged`, in shared memory, has kStagedElements for each warp.
  __device__ StagedRows(float* staged, int64_t rank, const Tile& tile)
      : offset_(static_cast<int>(reinterpret_cast<unsigned char*>(staged) - shared_memory()) +
                warp_id() * kStagedElements<R> * static_cast<int>(sizeof(float))),
        rank_(static_cast<int>(rank)),
        begin_(tile.row_begin + warp_id() * kWarpSize),
        end_(tile.row_end) {}

  __device__ bool left() const { return begin_ < end_; }
  __device__ void next() { begin_ += kWarps * kWarpSize; }

  // The lane's own row, if it has one.
  __device__ bool has_own() const { return lane_id() < count(); }
  __device__ float& own(int column) const {
    const auto i = static_cast<unsigned>(lane_id() * rank_ + column);
    return staged()[i + i / kWarpSize];
  }

  __device__ void load(const TallFactor& from) const {
    const float* const first = &from.at(begin_, 0) + lane_id();
    const int left = count() * rank_ - lane_id();
    float value[R];  // all loads first, because they take long
    POWERSGD_UNROLL
    for (int k = 0; k < R; ++k) value[k] = k * kWarpSize < left ? first[k * kWarpSize] : 0;
    float* const place = staged() + lane_id();
    POWERSGD_UNROLL
    for (int k = 0; k < R; ++k) {
      if (k * kWarpSize < left) place[k * (kWarpSize + 1)] = value[k];
    }
  }

  __device__ void store(const TallFactor& to) const {
    float* const first = &to.at(begin_, 0) + lane_id();
    const int left = count() * rank_ - lane_id();
    const float* const place = staged() + lane_id();
    POWERSGD_UNROLL
    for (int k = 0; k < R; ++k) {
      if (k * kWarpSize < left) first[k * kWarpSize] = place[k * (kWarpSize + 1)];
    }
  }

 private:
  __device__ int count() const {
    return end_ - begin_ < kWarpSize ? static_cast<int>(end_ - begin_) : kWarpSize;
  }
  // Computed anew, so that the compiler sees that it points to shared memory.
  __device__ float* staged() const { return reinterpret_cast<float*>(shared_memory() + offset_); }

  const int offset_;  // of the warp's rows in shared memory
  const int rank_;
  int64_t begin_;
  const int64_t end_;
};

}  // namespace powersgd::kernels::cuda
