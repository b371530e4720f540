// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <optional>
#include <string>

#include "powersgd/core/options.h"

namespace powersgd::test {

// The defaults of torch's PowerSGD hook, as Options.hook_defaults() of the Python module: float32
// factors, with which identities are tight.
inline Options hook_defaults() {
  Options options;
  options.matrix_approximation_rank = 1;
  options.start_powerSGD_iter = 1000;
  options.wire_dtype.reset();
  return options;
}

// The same with another rank, on any wire and from the first step on.
inline Options compressing(int64_t rank, std::optional<WireDType> wire = {}) {
  Options options = hook_defaults();
  options.matrix_approximation_rank = rank;
  options.start_powerSGD_iter = 0;
  options.wire_dtype = wire;
  return options;
}

// Names a case of a test.
inline std::string name_of(const std::optional<WireDType>& wire) {
  return wire ? to_string(*wire) : "as_it_is";
}

}  // namespace powersgd::test
