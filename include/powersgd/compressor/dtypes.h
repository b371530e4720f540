// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/core/ScalarType.h>

#include "powersgd/core/options.h"

namespace powersgd {

// Throws if `type` is not one of the floating dtypes that are compressed.
DType to_dtype(at::ScalarType type);

// The reverse.
at::ScalarType to_scalar_type(DType type);

// True for those dtypes. Gradients in any other are averaged exactly.
bool is_compressible(at::ScalarType type);

}  // namespace powersgd
