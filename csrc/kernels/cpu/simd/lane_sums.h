// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <type_traits>
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

template <class Mask, int kParts, class V, size_t... kLane>
inline V merge(V a, V b, std::index_sequence<kLane...>) {
  constexpr int kCount = sizeof...(kLane);
  const V first = POWERSGD_SHUFFLE(Mask, a, b, merged_lane(kLane, kCount, kParts)...);
  const V second =
      POWERSGD_SHUFFLE(Mask, a, b, (merged_lane(kLane, kCount, kParts) + kParts / 2)...);
  return first + second;
}

// Writes the first kItems sums that `vectors` hold in parts.
template <class F, int kItems, int kCount, int kParts>
inline void merge_all(const Vector<F>* vectors, F* sums) {
  using Mask = std::conditional_t<sizeof(F) == 4, Vector<int32_t>, Vector<int64_t>>;
  constexpr int kLane = static_cast<int>(kLanes<F>);
  constexpr int kNext = (kCount + 1) / 2;
  if constexpr (kParts > 1) {
    Vector<F> merged[kNext];
    POWERSGD_UNROLL
    for (int i = 0; i < kNext; ++i) {
      // The last one of an odd count is merged with itself: its sums come first, then once more.
      merged[i] = merge<Mask, kParts>(vectors[2 * i], vectors[std::min(2 * i + 1, kCount - 1)],
                                      std::make_index_sequence<kLane>());
    }
    merge_all<F, kItems, kNext, kParts / 2>(merged, sums);
  } else {
    F all[kCount * kLane];
    POWERSGD_UNROLL
    for (int i = 0; i < kCount; ++i) store(all + i * kLane, vectors[i]);
    std::copy_n(all, kItems, sums);
  }
}

// sums[i] = the sum of the lanes of vectors[i].
template <int kCount, class F>
inline void sums_of_lanes(const Vector<F>* vectors, F* sums) {
  merge_all<F, kCount, kCount, static_cast<int>(kLanes<F>)>(vectors, sums);
}

template <class F>
inline F sum_of_lanes(Vector<F> vector) {
  F sum;
  sums_of_lanes<1>(&vector, &sum);
  return sum;
}

}  // namespace powersgd::kernels::cpu::POWERSGD_TARGET
