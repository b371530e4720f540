// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <type_traits>

#include "kernels/cpu/blocking/tiles.h"
#include "kernels/cpu/simd/convert.h"
#include "kernels/cpu/simd/lane_sums.h"

namespace powersgd::kernels::cpu {

// True if an element of M may be out of the range of R, the dtype of memory.
template <class R>
constexpr bool kSaturates = std::is_same_v<R, Half>;

// The flags of a tile of project, gathered lane by lane.
template <class Arch, class F>
class ElementFlags {
 public:
  using V = Vector<Arch, F>;

  // Takes in elements of the gradient.
  POWERSGD_INLINE void examine(const V& gradient) { poison_ += gradient - gradient; }

  // Takes in elements of M, before they are cut to the range of R, the dtype of memory.
  template <class R>
  POWERSGD_INLINE void examine_m(const V& m) {
    if constexpr (kSaturates<R>) {
      highest_ = greater<Arch>(m, highest_);
      lowest_ = lesser<Arch>(m, lowest_);
    }
  }

  // R is the dtype that examine_m was called with.
  template <class R>
  POWERSGD_INLINE int32_t flags() const {
    int32_t flags = sum_of_lanes<Arch, F>(poison_) == 0 ? 0 : kNonFinite;
    if constexpr (kSaturates<R>) {
      const V beyond =
          (highest_ - clamped_to<Arch, R>(highest_)) + (clamped_to<Arch, R>(lowest_) - lowest_);
      if (!(sum_of_lanes<Arch, F>(beyond) == 0)) flags |= kSaturated;
    }
    return flags;
  }

 private:
  V poison_ = {};                 // NaN where the gradient was not finite
  V highest_ = {}, lowest_ = {};  // of M
};

}  // namespace powersgd::kernels::cpu
