// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "kernels/cpu/simd/lane_sums.h"
#include "kernels/cpu/simd/vector.h"

namespace powersgd::kernels::cpu::POWERSGD_TARGET {

// Says whether all elements of a tile's gradient are finite. The constructor is written out because
// GCC would compile a default one without the options of the target.
class FiniteCheck {
 public:
  FiniteCheck() : not_finite_{} {}

  void add(Floats gradient) { not_finite_ += gradient - gradient; }

  bool passed() const { return sum_of_lanes(not_finite_) == 0; }

 private:
  Floats not_finite_;  // NaN in the lanes where an element was not finite
};

}  // namespace powersgd::kernels::cpu::POWERSGD_TARGET
