// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "compressor/bucket_spec.h"
#include "powersgd/compressor.h"
#include "powersgd/parameter_state.h"

namespace powersgd {

// Purpose: what the wire's rounding has kept back of a bucket's raw segments, from step to step.
//
// Contract: the rounding is in the units of the loss scale of the last step. A step that delivers
// nothing leaves it as it was. The states of the raw parameters see their parts of it, so that
// another bucket can take them over.
//
// Ownership: it owns the rounding of the whole bucket, and shares the states.
//
// Threads: those of the compressor.
class RawRounding {
 public:
  RawRounding() = default;
  // `states[i]` belongs to `spec.plan.raw_parameters[i]`. Without states nobody else sees it.
  RawRounding(const BucketSpec& spec, std::vector<ParameterStatePtr> states);

  static int64_t bytes(const BucketSpec& spec) {
    return 2 * spec.plan.raw_numel() *
           static_cast<int64_t>(spec.factor_options().dtype().itemsize());
  }

  // Packets::rounding.
  void* data() const { return rounding_.data_ptr(); }

  // Takes over what other buckets have left in the states, and brings all to the step's loss scale.
  void begin_step(const StepInfo& step, bool is_captured);
  // Takes the step back if `skipped`, one int32 on the device, is not 0.
  void end_step(const at::Tensor& skipped);
  void rollback();

 private:
  void take_over(size_t index, bool sets_units);
  void rescale(const StepInfo& step, bool is_captured);

  std::vector<PlannedRawParameter> parameters_;
  std::vector<ParameterStatePtr> states_;
  at::Tensor rounding_;  // one element for each of the raw segments, in the factor dtype
  at::Tensor before_;    // before the step in progress, or before the last one
  at::Tensor units_, new_units_, factor_;  // one float64 each: loss scales, and their ratio
  at::Tensor is_skipped_;                  // one bool
  std::optional<double> known_units_;      // units_, if the host knows them
  bool was_captured_ = false;              // replays change units_
};

}  // namespace powersgd
