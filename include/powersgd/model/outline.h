// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>

#include "powersgd/core/options.h"
#include "powersgd/model/named_parameters.h"

namespace powersgd {

// The sizes of a compressed step of a model in which all parameters have gradients.
struct Outline {
  int64_t parameters = 0;             // parameters that have gradients
  int64_t compressed_parameters = 0;  // of these, as low-rank factors
  int64_t numel = 0;                  // elements of the gradients
  int64_t compressed_numel = 0;       // of these, as low-rank factors
  int64_t sent_numel = 0;             // elements sent in their place, if they are in one bucket
  int64_t bytes_before = 0;
  int64_t bytes_after = 0;
};

Outline outline_of(const NamedParameters& parameters, const Options& options);

}  // namespace powersgd
