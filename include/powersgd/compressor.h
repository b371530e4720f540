// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "powersgd/kernels.h"
#include "powersgd/options.h"
#include "powersgd/plan.h"

namespace powersgd {

class Stages;
class WirePayload;

// Throws if `type` is not one of the four floating dtypes that are compressed.
DType to_dtype(at::ScalarType type);
at::ScalarType to_scalar_type(DType type);
bool is_compressible(at::ScalarType type);

// Whether this build has the kernels for a device type.
bool has_kernels(c10::DeviceType device);

// What one parameter keeps from step to step. It belongs to the parameter, not to a bucket, so that
// a rebuilt bucket keeps its residuals. The tensors are allocated at the first compressed step and
// never replaced afterwards: kernels hold their addresses.
//
// The residual is E = memory - p_hat q_local; the subtraction is left to the next project.
struct ParameterState {
  uint64_t stream = 0;     // names the parameter to the random generator, the same on all ranks
  double grad_scale = 1;   // the loss scale in whose units memory is
  int64_t last_step = -1;  // the step that was last projected
  uint64_t last_job = 0;   // the last job of its engine that was submitted with it
  MatrixShape shape;
  int64_t rank = 0;
  at::Tensor memory;   // [rows, cols] residual dtype; undefined without error feedback
  at::Tensor p_hat;    // [rows, rank] factor dtype
  at::Tensor q_local;  // [rank, cols] factor dtype
  at::Tensor q_warm;   // [rank, cols] factor dtype
  std::shared_ptr<ParameterState> shares_q_of;  // whose q_warm this one uses; null: its own

  bool allocated() const { return q_warm.defined(); }
};
using ParameterStatePtr = std::shared_ptr<ParameterState>;

// Allocates with zeros, but q_warm with its random start; first the state that it shares q_warm of.
void allocate(ParameterState& state, const MatrixShape& shape, int64_t rank, const Options& options,
              at::ScalarType gradient_type, at::Device device);

// E, [rows, cols] in the factor dtype: a new tensor. Zeros without error feedback.
at::Tensor residual(const ParameterState& state);

// Makes `value` ([rows, cols]) the residual. Keeps q_warm.
void set_residual(ParameterState& state, const at::Tensor& value);

// E = memory from here on: what the last step delivered was dropped. `dropped`: one element on the
// states' device, nothing happens if it is 0; undefined: it was. Does not wait for the device.
void keep_delivered(const std::vector<ParameterStatePtr>& states, const at::Tensor& dropped);

// Counts the skipped steps of one owner (a model) over all of its buckets, on the devices
// themselves: whether a step is skipped is known there first.
class SkipCounter {
 public:
  // Where the kernels of a device count.
  kernels::SkippedSteps* on(at::Device device);
  // Synchronises with the device. To be called when no step is in flight.
  int64_t steps();
  std::vector<at::Device> devices();

 private:
  std::mutex mutex_;
  std::vector<at::Tensor> counts_;  // one per device
};

// What one step tells the stages.
struct StepInfo {
  double output_scale = 1;  // 1 for SUM, 1 / world size for AVG
  double grad_scale = 1;    // the loss scale of this step's gradient
  uint64_t step = 0;
  bool same_start = false;  // a cold start is the one of step 0: equal tensors have equal outputs
};

// Runs the stages of one bucket of a fixed layout; never communicates. A step is the calls
//
//   project -> (sum the payload over ranks) -> orthogonalize -> back_project -> (sum) ->
//   reconstruct
//
// in this order, all on one thread or stream at a time. Every rank must hold an equal plan and
// equal options. After an exception between project and reconstruct, `rollback` takes the states
// back to what they were before the step.
class BucketCompressor {
 public:
  // `states[i]` belongs to `plan.matrices[i]`. Buckets may share states, one after the other.
  BucketCompressor(BucketPlan plan, std::vector<ParameterStatePtr> states, const Options& options,
                   at::ScalarType gradient_type, at::Device device,
                   std::shared_ptr<SkipCounter> skips = nullptr);
  ~BucketCompressor();

  // `gradient`: contiguous, plan.gradient_numel elements; kept until reconstruct or rollback.
  // Returns the P payload: [ P of each matrix | raw segments | activities | non-finite count ], in
  // the wire's dtype.
  at::Tensor& project(const at::Tensor& gradient, const StepInfo& step);
  void orthogonalize();
  // Returns the Q payload.
  at::Tensor& back_project();
  void reconstruct();

  // Undoes project: memory = M - G, to within one rounding of M. The gradient is left as it is.
  void rollback();

  const BucketPlan& plan() const { return plan_; }
  // All that a step changes.
  std::vector<ParameterStatePtr> states_in_use() const;
  int64_t payload_bytes() const;   // of one step, both payloads
  int64_t gradient_bytes() const;  // of the same, uncompressed

 private:
  void prepare();
  void keep_rounding_of_raw(const at::Tensor& exact);
  double residual_scale(double grad_scale);
  std::vector<kernels::Matrix> matrix_table() const;

  const BucketPlan plan_;
  const std::vector<ParameterStatePtr> states_;
  const Options options_;
  const at::ScalarType gradient_type_;
  const at::Device device_;
  const Stages& stages_;
  const std::shared_ptr<SkipCounter> skips_;

  kernels::Bucket bucket_{};
  std::vector<at::Tensor> tables_;  // keeps what bucket_ points at
  at::Tensor p_payload_, q_payload_, verdict_;
  std::unique_ptr<WirePayload> p_wire_, q_wire_;
  at::Tensor raw_;  // the raw segments in p_payload_
  at::Tensor
      raw_residual_;  // what the wire has rounded off of them; undefined if it does not round
  std::vector<at::Tensor> q_sent_, q_local_;  // parts of q_payload_, and the states' q_local
  at::Tensor gradient_;                       // of the step in progress
};

}  // namespace powersgd
