// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "compressor/bucket_spec.h"
#include "powersgd/compressor.h"
#include "powersgd/kernels.h"

namespace powersgd {

// The matrices of a bucket with the tensors of their states, which are allocated.
std::vector<kernels::Matrix> matrix_table(const BucketPlan& plan,
                                          const std::vector<ParameterStatePtr>& states);

// A copy of such a table in the memory of a device.
at::Tensor upload_matrices(const std::vector<kernels::Matrix>& matrices, at::Device device);

// A bucket as the stages see it. Owns the tables, the tiles, the workspace and the verdict that
// bucket() points at, on the bucket's device; the caller keeps the states and the payloads.
class BucketTables {
 public:
  BucketTables() = default;
  // Adds to `bucket` the tables and all that follows from them. A verdict that it has stays.
  BucketTables(const kernels::Bucket& bucket, const std::vector<kernels::Matrix>& matrices,
               const std::vector<kernels::RawSegment>& raw, at::Device device);
  // A whole bucket, whose payloads have the sizes and offsets of the plan.
  BucketTables(const BucketSpec& spec, const std::vector<ParameterStatePtr>& states,
               StepCounter* step_counter, const at::Tensor& p_payload, const at::Tensor& q_payload);

  // Points the bucket at the step's gradient.
  void begin_step(const at::Tensor& gradient, const StepInfo& step, double residual_scale);

  const kernels::Bucket& bucket() const { return bucket_; }

 private:
  kernels::Bucket bucket_{};
  at::Tensor matrices_, raw_segments_, tiles_, workspace_, verdict_;  // what bucket_ points at
};

}  // namespace powersgd
