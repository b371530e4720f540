// SPDX-License-Identifier: BSD-3-Clause
#include "powersgd/dtypes.h"

#include <c10/util/Exception.h>

namespace powersgd {

DType to_dtype(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return DType::kFloat32;
    case at::kDouble:
      return DType::kFloat64;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kHalf:
      return DType::kFloat16;
    default:
      TORCH_CHECK(false, "powersgd compresses float32, float64, bfloat16 and float16, got ", type);
  }
}

at::ScalarType to_scalar_type(DType type) {
  switch (type) {
    case DType::kFloat64:
      return at::kDouble;
    case DType::kBFloat16:
      return at::kBFloat16;
    case DType::kFloat16:
      return at::kHalf;
    default:
      return at::kFloat;
  }
}

bool is_compressible(at::ScalarType type) {
  return type == at::kFloat || type == at::kBFloat16 || type == at::kHalf;
}

at::ScalarType factor_type(at::ScalarType gradient_type) {
  return gradient_type == at::kDouble ? at::kDouble : at::kFloat;
}

at::ScalarType residual_type(at::ScalarType gradient_type, const Options& options) {
  return gradient_type == at::kDouble ? at::kDouble : to_scalar_type(options.residual_dtype);
}

}  // namespace powersgd
