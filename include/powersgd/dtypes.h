// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/core/ScalarType.h>

#include "powersgd/options.h"

namespace powersgd {

// Throws if `type` is not one of the four floating dtypes that are compressed.
DType to_dtype(at::ScalarType type);

// The reverse.
at::ScalarType to_scalar_type(DType type);

// True for those four dtypes.
bool is_compressible(at::ScalarType type);

// The dtype of the factors, in which gradients are multiplied and summed.
at::ScalarType factor_type(at::ScalarType gradient_type);

// The dtype that the residual is kept in.
at::ScalarType residual_type(at::ScalarType gradient_type, const Options& options);

}  // namespace powersgd
