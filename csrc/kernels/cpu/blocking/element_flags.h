// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <type_traits>

#include "kernels/cpu/blocking/tiles.h"
#include "kernels/cpu/simd/convert.h"
#include "kernels/cpu/simd/lane_sums.h"

namespace powersgd::kernels::cpu {

// Whether elements that the factor type holds with ease may be beyond what memory holds.
template <class R>
constexpr bool kSaturates = std::is_same_v<R, Half>;

// What a tile of project or project_transposed has met, lane by lane.
template <class Arch, class F>
class Met {
 public:
  using V = Vector<Arch, F>;

  // Elements of the gradient.
  POWERSGD_INLINE void look_at(const V& gradient) { poison_ += gradient - gradient; }

  // Elements of M, before they are cut to what memory holds as R.
  template <class R>
  POWERSGD_INLINE void look_at_m(const V& m) {
    if constexpr (kSaturates<R>) {
      highest_ = greater<Arch>(m, highest_);
      lowest_ = lesser<Arch>(m, lowest_);
    }
  }

  // R: of look_at_m.
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
