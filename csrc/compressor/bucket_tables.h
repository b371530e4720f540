// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "compressor/bucket_spec.h"
#include "compressor/payloads.h"
#include "powersgd/compressor/compressor.h"
#include "powersgd/compressor/workspace.h"
#include "powersgd/kernels/kernels.h"

namespace powersgd {

// The tables of a bucket on the host.
struct HostTables {
  std::vector<kernels::Matrix> matrices;
  std::vector<kernels::RawSegment> raw;
  kernels::TileTable tiles;
  // What this rank sends. These are empty if payloads travel as they are.
  kernels::PacketFactors p_factors, q_factors;
};

// The tables on the device, all in one tensor.
struct DeviceTables {
  at::Tensor memory;
  const kernels::PacketFactor* p_factors;
  const kernels::PacketFactor* q_factors;
  int32_t num_p_factors, num_q_factors;
};

// Uploads the tables in one copy, for which the host does not wait, and points `bucket` to them.
// The tensor must live as long as the bucket.
DeviceTables upload_tables(kernels::Bucket& bucket, const HostTables& tables, at::Device device);

struct BytesOfTables {
  int64_t tables;     // all that a BucketTables owns
  int64_t workspace;  // what it reserves of each workspace
};
BytesOfTables bytes_of_tables(const BucketSpec& spec);

// The table of a bucket's matrices without what belongs to their states.
std::vector<kernels::Matrix> matrices_without_states(const BucketPlan& plan);

// The elements of the payloads of one step, in float32.
struct Payloads {
  at::Tensor p, q;
};

// A bucket as the stages see it. It owns the tables, the tiles, the counters and the state that
// bucket() points at, and shares the workspaces. The caller keeps the states and the payloads.
class BucketTables {
 public:
  BucketTables() = default;
  // Builds all of a bucket: its tables, tiles, counters and a state. `states` are allocated
  // already. Grows the workspaces to fit the stages.
  BucketTables(const BucketSpec& spec, const std::vector<ParameterStatePtr>& states,
               StepCounter* step_counter, const Workspaces& workspaces, const Payloads& payloads);

  // Sets what differs from step to step. In a captured graph, the device numbers the steps, one per
  // replay.
  void begin_step(const BucketPlan& plan, const at::Tensor& gradient, const StepInfo& step,
                  bool is_captured);
  // Called before orthogonalize. A bucket made since the last step may have moved the workspaces,
  // so each part asks where its own is.
  void begin_second_part() { bucket_.workspace = workspaces_.second->data(); }

  const kernels::Bucket& bucket() const { return bucket_; }
  // Not 0 if the step is skipped. Its lower half is BucketState::skipped.
  at::Tensor skipped() const { return state_.select(0, 1); }
  // Packets::factors of both payloads.
  const DeviceTables& tables() const { return tables_; }

 private:
  void put_uses(const BucketPlan& plan, const std::vector<Use>& uses);

  kernels::Bucket bucket_{};
  Workspaces workspaces_;
  DeviceTables tables_{};  // what bucket_ points at, with the next three
  at::Tensor counters_, state_;
  at::Tensor used_;  // undefined until a parameter was unused
};

}  // namespace powersgd
