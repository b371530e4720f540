// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "convert.h"
#include "lane_sums.h"
#include "tiles.h"

namespace powersgd::kernels::cpu {

// What a tile of project or project_transposed has met, lane by lane.
template <class Arch, class F>
class Met {
 public:
  using V = Vector<Arch, F>;

  // Elements of the gradient. Returns 0 for each that is finite, NaN for the others.
  POWERSGD_INLINE V look_at(const V& gradient) {
    const V zero_or_nan = gradient - gradient;
    poison_ += zero_or_nan;
    return zero_or_nan;
  }

  // Elements of M, before they are cut to what memory holds as R.
  template <class R>
  POWERSGD_INLINE void look_at_m(const V& m) {
    if constexpr (sizeof(R) == 2) {
      saturated_ = m < -kLargest<R> || m > kLargest<R> ? V{} + 1 : saturated_;
    }
  }

  POWERSGD_INLINE int32_t flags() const {
    return (sum_of_lanes<Arch, F>(poison_) == 0 ? 0 : kNonFinite) |
           (sum_of_lanes<Arch, F>(saturated_) == 0 ? 0 : kSaturated);
  }

 private:
  V poison_ = {};     // NaN where the gradient was not finite
  V saturated_ = {};  // 1 where M was out of range
};

}  // namespace powersgd::kernels::cpu
