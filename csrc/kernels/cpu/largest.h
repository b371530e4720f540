// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <utility>

#include "kernels/cpu/simd/convert.h"

namespace powersgd::kernels::cpu::POWERSGD_TARGET {

// The largest magnitude of the lanes of vectors. A NaN counts as larger than an infinity, because
// numbers that are not negative have the order of their bits. The functions are for tile functions,
// which inline them: no other caller is sure to pass vectors in the target's registers.
class LargestOfLanes {
 public:
  void add(Floats values) {
    const Words magnitudes = bits_as<Words>(values) & 0x7FFFFFFFu;
    words_ = greater_of(magnitudes, words_);
  }

  float get() const { return bits_as<Floats>(folded<kLanes<float> / 2>(words_, kAllLanes))[0]; }

 private:
  static constexpr std::make_index_sequence<static_cast<size_t>(kLanes<float>)> kAllLanes{};

  static Words greater_of(Words a, Words b) { return a > b ? a : b; }

  // Returns a vector whose lane 0 is the largest of the first 2 kBy lanes.
  template <ptrdiff_t kBy, size_t... kLane>
  static Words folded(Words words, std::index_sequence<kLane...> all_lanes) {
    const Words other = POWERSGD_SHUFFLE(Words, words, words, ((kLane + kBy) % kLanes<float>)...);
    const Words largest = greater_of(words, other);
    if constexpr (kBy > 1) {
      return folded<kBy / 2>(largest, all_lanes);
    } else {
      return largest;
    }
  }

  Words words_ = {};
};

}  // namespace powersgd::kernels::cpu::POWERSGD_TARGET
