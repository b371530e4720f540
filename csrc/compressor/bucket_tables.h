// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "compressor/bucket_spec.h"
#include "powersgd/compressor.h"
#include "powersgd/kernels.h"

namespace powersgd {

// Copies the tables to the device, all in one tensor by one copy that the host does not wait for.
// Makes `bucket` point to them. The tensor is to live as long as the bucket.
at::Tensor upload_tables(kernels::Bucket& bucket, const std::vector<kernels::Matrix>& matrices,
                         const std::vector<kernels::RawSegment>& raw,
                         const kernels::TileTable& tiles, at::Device device);

// The bytes of all that a BucketTables of this plan owns.
int64_t bytes_of_tables(const BucketPlan& plan, DType factor_dtype, DType wire_dtype,
                        at::DeviceType device);

// The tensors that the ranks sum in one step, both of one dtype.
struct Payloads {
  at::Tensor p, q;
};

// A bucket as the stages see it. It owns the tables, the tiles, the workspace, the counters and
// the state that bucket() points at. The caller keeps the states and the payloads.
class BucketTables {
 public:
  BucketTables() = default;
  // Completes `bucket` by the tables, their tiles, a workspace, counters and a state.
  BucketTables(const kernels::Bucket& bucket, const std::vector<kernels::Matrix>& matrices,
               const std::vector<kernels::RawSegment>& raw, at::Device device);
  // Builds all of a bucket but its payloads. Its states are allocated.
  BucketTables(const BucketSpec& spec, const std::vector<ParameterStatePtr>& states,
               StepCounter* step_counter);

  // Makes the next stages use these payloads, of the sizes and the offsets of the plan. `rounding`
  // has an element for each of a raw segment. It is undefined if the wire does not round.
  void set_payloads(const Payloads& payloads, const at::Tensor& rounding);

  // Sets what differs from step to step. The steps of a graph that is being captured are numbered
  // by the device, one by one at each replay.
  void begin_step(const at::Tensor& gradient, const StepInfo& step, bool is_captured);

  const kernels::Bucket& bucket() const { return bucket_; }

 private:
  kernels::Bucket bucket_{};
  at::Tensor tables_, workspace_, counters_, state_;  // what bucket_ points at
};

}  // namespace powersgd
