// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "kernels/cuda/launch.cuh"
#include "kernels/shared/layout.h"

namespace powersgd::kernels::cuda {

// The rows that a warp has in shared memory at a time, one per lane or, in double, per other lane.
template <typename F>
constexpr int kRowsAtATime = kWarpSize * int{sizeof(float)} / int{sizeof(F)};

// A gap follows every kWarpSize elements, so that the lanes find their rows in different banks.
template <int R, typename F>
constexpr int kStagedElements = kRowsAtATime<F> * R * (kWarpSize + 1) / kWarpSize;

// A warp's rows of a tile on their way through shared memory: to global memory neighboring lanes
// access neighboring elements, where a lane per row would touch a line per lane.
template <int R, typename F>
class StagedRows {
 public:
  // `staged`, in shared memory, has kStagedElements for each warp.
  __device__ StagedRows(F* staged, int64_t rank, const Tile& tile)
      : offset_(static_cast<int>(reinterpret_cast<unsigned char*>(staged) - shared_memory()) +
                warp_id() * kStagedElements<R, F> * static_cast<int>(sizeof(F))),
        rank_(static_cast<int>(rank)),
        begin_(tile.row_begin + warp_id() * kRowsAtATime<F>),
        end_(tile.row_end) {}

  __device__ bool left() const { return begin_ < end_; }
  __device__ void next() { begin_ += kWarps * kRowsAtATime<F>; }

  // The lane's own row, if it has one.
  __device__ bool has_own() const { return lane_id() < count(); }
  __device__ F& own(int column) const {
    const auto i = static_cast<unsigned>(lane_id() * rank_ + column);
    return staged()[i + i / kWarpSize];
  }

  __device__ void load(const TallFactor<F>& from) const {
    const F* const first = &from.at(begin_, 0) + lane_id();
    const int left = count() * rank_ - lane_id();
    F value[R];  // all loads first, because they take long
    POWERSGD_UNROLL
    for (int k = 0; k < R; ++k) value[k] = k * kWarpSize < left ? first[k * kWarpSize] : 0;
    F* const place = staged() + lane_id();
    POWERSGD_UNROLL
    for (int k = 0; k < R; ++k) {
      if (k * kWarpSize < left) place[k * (kWarpSize + 1)] = value[k];
    }
  }

  __device__ void store(const TallFactor<F>& to) const {
    F* const first = &to.at(begin_, 0) + lane_id();
    const int left = count() * rank_ - lane_id();
    const F* const place = staged() + lane_id();
    POWERSGD_UNROLL
    for (int k = 0; k < R; ++k) {
      if (k * kWarpSize < left) first[k * kWarpSize] = place[k * (kWarpSize + 1)];
    }
  }

 private:
  __device__ int count() const {
    return end_ - begin_ < kRowsAtATime<F> ? static_cast<int>(end_ - begin_) : kRowsAtATime<F>;
  }
  // Computed anew, so that the compiler sees that it points to shared memory.
  __device__ F* staged() const { return reinterpret_cast<F*>(shared_memory() + offset_); }

  const int offset_;  // of the warp's rows in shared memory
  const int rank_;
  int64_t begin_;
  const int64_t end_;
};

}  // namespace powersgd::kernels::cuda
