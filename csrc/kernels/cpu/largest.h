// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#include "kernels/cpu/simd/convert.h"

namespace powersgd::kernels::cpu::POWERSGD_TARGET {

// The largest magnitude of the lanes of vectors. A NaN counts as larger than an infinity, because
// numbers that are not negative have the order of their bits. The functions are for tile functions,
// which inline them: no other caller is sure to pass vectors in the target's registers.
template <class F>
class LargestOfLanes {
 public:
  using Word = std::conditional_t<sizeof(F) == 4, uint32_t, uint64_t>;

  void add(Vector<F> values) {
    const Vector<Word> magnitudes = bits_as<Vector<Word>>(values) & (~Word{0} >> 1);
    words_ = greater_of(magnitudes, words_);
  }

  F get() const { return bits_as<Vector<F>>(folded<kLanes<F> / 2>(words_, kAllLanes))[0]; }

 private:
  using V = Vector<Word>;
  static constexpr std::make_index_sequence<static_cast<size_t>(kLanes<F>)> kAllLanes{};

  static V greater_of(V a, V b) { return a > b ? a : b; }

  // Returns a vector whose lane 0 is the largest of the first 2 kBy lanes.
  template <ptrdiff_t kBy, size_t... kLane>
  static V folded(V words, std::index_sequence<kLane...> all_lanes) {
    const V other = POWERSGD_SHUFFLE(V, words, words, ((kLane + kBy) % kLanes<F>)...);
    const V largest = greater_of(words, other);
    if constexpr (kBy > 1) {
      return folded<kBy / 2>(largest, all_lanes);
    } else {
      return largest;
    }
  }

  V words_ = {};
};

}  // namespace powersgd::kernels::cpu::POWERSGD_TARGET
