// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "powersgd/options.h"

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

}  // namespace powersgd::test
