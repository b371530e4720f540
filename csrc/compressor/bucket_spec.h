// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "powersgd/compressor/dtypes.h"
#include "powersgd/compressor/payload.h"
#include "powersgd/core/options.h"
#include "powersgd/core/plan.h"

namespace powersgd {

// The layout of a bucket, the options, the dtype and device of its gradients, and the ranks.
struct BucketSpec {
  BucketPlan plan;
  Options options;
  at::ScalarType gradient_type;
  at::Device device;
  Ranks ranks;

  at::TensorOptions factor_options() const { return at::TensorOptions(device).dtype(at::kFloat); }
  int64_t gradient_bytes() const {
    return plan.gradient_numel * static_cast<int64_t>(c10::elementSize(gradient_type));
  }

  void check(const at::Tensor& gradient) const {
    TORCH_INTERNAL_ASSERT(gradient.is_contiguous() && gradient.numel() == plan.gradient_numel &&
                          gradient.scalar_type() == gradient_type);
  }
};

}  // namespace powersgd
