// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <type_traits>

#include "kernels/cpu/blocking/tiles.h"
#include "kernels/cpu/simd/convert.h"
#include "kernels/cpu/simd/lane_sums.h"

namespace powersgd::kernels::cpu::POWERSGD_TARGET {

// True if an element of M may be out of the range of R, the type of the residual.
template <class R>
constexpr bool kSaturates = std::is_same_v<R, Half>;

// The flags of a tile of project, gathered lane by lane. The constructor is written out because GCC
// would compile a default one without the options of the target.
template <class F>
class ElementFlags {
 public:
  using V = Vector<F>;

  ElementFlags() : not_finite_{}, highest_{}, lowest_{} {}

  void examine_gradient(V gradient) { not_finite_ += gradient - gradient; }

  // Takes in elements of M, before they are cut to the range of R.
  template <class R>
  void examine_m(V m) {
    if constexpr (kSaturates<R>) {
      highest_ = greater(m, highest_);
      lowest_ = lesser(m, lowest_);
    }
  }

  // Returns kNonFinite and kSaturated as they hold. R is that of examine_m.
  template <class R>
  int32_t flags() const {
    int32_t flags = sum_of_lanes<F>(not_finite_) == 0 ? 0 : kNonFinite;
    if constexpr (kSaturates<R>) {
      const V beyond = (highest_ - clamped_to<R>(highest_)) + (clamped_to<R>(lowest_) - lowest_);
      if (!(sum_of_lanes<F>(beyond) == 0)) flags |= kSaturated;
    }
    return flags;
  }

 private:
  V not_finite_;        // NaN in the lanes where an element of the gradient was not finite
  V highest_, lowest_;  // of M
};

}  // namespace powersgd::kernels::cpu::POWERSGD_TARGET
