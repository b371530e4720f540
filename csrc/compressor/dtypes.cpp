// SPDX-License-Identifier: BSD-3-Clause
#include "powersgd/compressor/dtypes.h"

#include <c10/util/Exception.h>

namespace powersgd {

DType to_dtype(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return DType::kFloat32;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kHalf:
      return DType::kFloat16;
    default:
      TORCH_CHECK(false, "powersgd compresses float32, bfloat16 and float16, got ", type);
  }
}

at::ScalarType to_scalar_type(DType type) {
  switch (type) {
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

}  // namespace powersgd
