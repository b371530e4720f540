// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "compressor/bucket_spec.h"
#include "powersgd/compressor.h"
#include "powersgd/kernels.h"
#include "powersgd/workspace.h"

namespace powersgd {

// Copies the tables to the device, all in one tensor by one copy that the host does not wait for.
// Makes `bucket` point to them. The tensor is to live as long as the bucket.
at::Tensor upload_tables(kernels::Bucket& bucket, const std::vector<kernels::Matrix>& matrices,
                         const std::vector<kernels::RawSegment>& raw,
                         const kernels::TileTable& tiles, at::Device device);

struct BytesOfTables {
  int64_t tables;     // all that a BucketTables owns
  int64_t workspace;  // what it reserves of each workspace
};
BytesOfTables bytes_of_tables(const BucketPlan& plan, DType factor_dtype, DType wire_dtype,
                              at::DeviceType device);

// The tensors that the ranks sum in one step, both of one dtype.
struct Payloads {
  at::Tensor p, q;
};

// A bucket as the stages see it. It owns the tables, the tiles, the counters and the state that
// bucket() points at, and shares the workspaces. The caller keeps the states and the payloads.
class BucketTables {
 public:
  BucketTables() = default;
  // Completes `bucket` by the tables, their tiles, counters and a state. Reserves the workspaces.
  BucketTables(const kernels::Bucket& bucket, const std::vector<kernels::Matrix>& matrices,
               const std::vector<kernels::RawSegment>& raw, at::Device device,
               const Workspaces& workspaces);
  // Builds all of a bucket but its payloads. Its states are allocated.
  BucketTables(const BucketSpec& spec, const std::vector<ParameterStatePtr>& states,
               StepCounter* step_counter, const Workspaces& workspaces);

  // Makes the next stages use these payloads, of the sizes and the offsets of the plan. `rounding`
  // has an element for each of a raw segment. It is undefined if the wire does not round.
  void set_payloads(const Payloads& payloads, const at::Tensor& rounding);

  // Sets what differs from step to step. The steps of a graph that is being captured are numbered
  // by the device, one by one at each replay.
  void begin_step(const at::Tensor& gradient, const StepInfo& step, bool is_captured);
  // Called before orthogonalize. A bucket that was made since the last step may have moved the
  // workspaces, so each part asks where its own is.
  void begin_second_part() { bucket_.workspace = workspaces_.second->data(); }

  const kernels::Bucket& bucket() const { return bucket_; }

 private:
  kernels::Bucket bucket_{};
  Workspaces workspaces_;
  at::Tensor tables_, counters_, state_;  // what bucket_ points at
};

}  // namespace powersgd
