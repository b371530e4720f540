// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "powersgd/dtypes.h"
#include "powersgd/options.h"
#include "powersgd/plan.h"

namespace powersgd {

// The layout of a bucket, the options, and the dtype and device of its gradients.
struct BucketSpec {
  BucketPlan plan;
  Options options;
  at::ScalarType gradient_type;
  at::Device device;

  at::TensorOptions factor_options() const {
    return at::TensorOptions(device).dtype(factor_type(gradient_type));
  }
  // The dtype that payloads travel in.
  at::ScalarType wire_type() const {
    return options.wire_dtype ? to_scalar_type(*options.wire_dtype) : factor_type(gradient_type);
  }
  // The bytes of that many elements of a payload on the wire.
  int64_t wire_bytes(int64_t numel) const {
    return numel * static_cast<int64_t>(c10::elementSize(wire_type()));
  }
  int64_t gradient_bytes() const {
    return plan.gradient_numel * static_cast<int64_t>(c10::elementSize(gradient_type));
  }
  // The elements of all raw segments.
  int64_t raw_numel() const { return plan.counts_offset() - plan.raw_offset(); }

  void check(const at::Tensor& gradient) const {
    TORCH_INTERNAL_ASSERT(gradient.is_contiguous() && gradient.numel() == plan.gradient_numel &&
                          gradient.scalar_type() == gradient_type);
  }
};

}  // namespace powersgd
