// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <utility>

#include "kernels/cpu/simd/vector.h"

// The sums of the lanes of several vectors at once: pairs of vectors are merged into one, each
// element the sum of two, until a single vector holds one sum (or a few parts of it) per input.
// That takes a third of the shuffles of one sum after the other.
namespace powersgd::kernels::cpu::POWERSGD_TARGET {

// A vector of several sums holds each in `parts` neighboring lanes. Lane `lane` of the merger of
// two such vectors is the sum of this lane of the pair and the one parts / 2 after it.
constexpr int merged_lane(int lane, int lanes, int parts) {
  const int half = parts / 2;
  const int item = lane / half;
  const int items = lanes / parts;
  return (item < items ? item * parts : lanes + (item - items) * parts) + lane % half;
}

template <int kParts, size_t... kLane>
inline Floats merge(Floats a, Floats b, std::index_sequence<kLane...>) {
  using Mask = Vector<int32_t>;
  constexpr int kCount = sizeof...(kLane);
  const Floats first = POWERSGD_SHUFFLE(Mask, a, b, merged_lane(kLane, kCount, kParts)...);
  const Floats second =
      POWERSGD_SHUFFLE(Mask, a, b, (merged_lane(kLane, kCount, kParts) + kParts / 2)...);
  return first + second;
}

// Writes the first kItems sums that `vectors` hold in parts.
template <int kItems, int kCount, int kParts>
inline void merge_all(const Floats* vectors, float* sums) {
  constexpr int kLane = static_cast<int>(kLanes<float>);
  constexpr int kNext = (kCount + 1) / 2;
  if constexpr (kParts > 1) {
    Floats merged[kNext];
    POWERSGD_UNROLL
    for (int i = 0; i < kNext; ++i) {
      // The last one of an odd count is merged with itself: its sums come first, then once more.
      merged[i] = merge<kParts>(vectors[2 * i], vectors[std::min(2 * i + 1, kCount - 1)],
                                std::make_index_sequence<kLane>());
    }
    merge_all<kItems, kNext, kParts / 2>(merged, sums);
  } else {
    float all[kCount * kLane];
    POWERSGD_UNROLL
    for (int i = 0; i < kCount; ++i) store(all + i * kLane, vectors[i]);
    std::copy_n(all, kItems, sums);
  }
}

// sums[i] = the sum of the lanes of vectors[i].
template <int kCount>
inline void sums_of_lanes(const Floats* vectors, float* sums) {
  merge_all<kCount, kCount, static_cast<int>(kLanes<float>)>(vectors, sums);
}

inline float sum_of_lanes(Floats vector) {
  float sum;
  sums_of_lanes<1>(&vector, &sum);
  return sum;
}

}  // namespace powersgd::kernels::cpu::POWERSGD_TARGET
