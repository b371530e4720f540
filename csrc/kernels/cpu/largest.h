// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/cpu/simd/convert.h"

// The largest magnitude of a payload, from which its next scale follows.
namespace powersgd::kernels::cpu::POWERSGD_TARGET {

// The largest magnitude of several values, which threads may add in any order. A NaN counts as
// larger than an infinity.
class Largest {
 public:
  template <class F>
  void add(F magnitude) {
    const double value = magnitude;
    uint64_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    uint64_t known = bits_;
    while (bits > known && !bits_.compare_exchange_weak(known, bits)) {
    }
  }

  double get() const {
    const uint64_t bits = bits_;
    double value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
  }

 private:
  std::atomic<uint64_t> bits_{0};  // numbers that are not negative have the order of their bits
};

// The same, of the lanes of vectors. Its functions are for tile functions, which inline them: no
// other caller is sure to pass vectors in the target's registers.
template <class F>
class LargestOfLanes {
 public:
  using Word = std::conditional_t<sizeof(F) == 4, uint32_t, uint64_t>;

  void add(Vector<F> values) {
    const Vector<Word> magnitudes = bits_as<Vector<Word>>(values) & (~Word{0} >> 1);
    words_ = magnitudes > words_ ? magnitudes : words_;
  }

  F get() const {
    Word lanes[kLanes<F>];
    store(lanes, words_);
    const Word bits = *std::max_element(lanes, lanes + kLanes<F>);
    F value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
  }

  void add_to(Largest& largest) const { largest.add(get()); }

 private:
  Vector<Word> words_ = {};
};

}  // namespace powersgd::kernels::cpu::POWERSGD_TARGET
