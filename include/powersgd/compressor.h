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

// Of what a gradient is multiplied with and summed up in, and of what remains of it.
at::ScalarType factor_type(at::ScalarType gradient_type);
at::ScalarType residual_type(at::ScalarType gradient_type, const Options& options);

// Whether this build has the kernels for a device type.
bool has_kernels(c10::DeviceType device);

// What one parameter keeps from step to step. It belongs to the parameter, not to a bucket, so that
// a rebuilt bucket keeps its residuals. The tensors are allocated at the first compressed step and
// never replaced afterwards: kernels hold their addresses.
//
// The residual is E = memory - p_hat q_local; the subtraction is left to the next project. In the
// alternating mode it is memory - p_local q_warm where P was the last factor sent.
struct ParameterState {
  uint64_t stream = 0;     // names the parameter to the random generator, the same on all ranks
  double grad_scale = 1;   // the loss scale in whose units memory is
  int64_t last_step = -1;  // the step that was last projected
  MatrixShape shape;
  int64_t rank = 0;
  at::Tensor memory;    // [rows, cols] residual dtype; undefined without error feedback
  at::Tensor p_hat;     // [rows, rank] factor dtype
  at::Tensor q_local;   // [rank, cols] factor dtype
  at::Tensor q_warm;    // [rank, cols] factor dtype; alternating: rows are orthonormal
  at::Tensor p_local;   // [rows, rank] factor dtype: this rank's P; undefined if not alternating
  bool sent_p = false;  // alternating: the last factor sent is P, the next is Q

  bool allocated() const { return q_warm.defined(); }
};
using ParameterStatePtr = std::shared_ptr<ParameterState>;

// Allocates with zeros, but q_warm, and p_hat in the alternating mode, with a random start; first
// the state that it shares q_warm of.
void allocate(ParameterState& state, const MatrixShape& shape, int64_t rank, const Options& options,
              at::ScalarType gradient_type, at::Device device);

// This rank's factor of what was sent last: 0 there is nothing delivered.
at::Tensor& delivered_factor(ParameterState& state);

// E, [rows, cols] in the factor dtype: a new tensor. Zeros without error feedback.
at::Tensor residual(const ParameterState& state);

// Makes `value` ([rows, cols]) the residual. Keeps q_warm.
void set_residual(ParameterState& state, const at::Tensor& value);

// Makes the rows of q_warm orthonormal, as the alternating mode needs them.
void orthonormalize_q(ParameterState& state, const Options& options);

// E = memory from here on: what the last step delivered was dropped. `dropped`: one element on the
// states' device, nothing happens if it is 0; undefined: it was. Does not wait for the device.
void keep_delivered(const std::vector<ParameterStatePtr>& states, const at::Tensor& dropped);

// Counts certain steps of one owner (a model) over all of its buckets, on the devices themselves:
// whether a step is skipped is known there first.
class StepCounter {
 public:
  // Where the kernels of a device count.
  kernels::StepCounts* on(at::Device device);
  struct Totals {
    int64_t skipped = 0, saturated = 0;
  };
  // Synchronises with the devices. To be called when no step is in flight.
  Totals totals();
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
  bool drop_residual = false;  // the residual is another tensor's: leave it out and drop it
  bool same_start = false;  // a cold start is the one of step 0: equal tensors have equal outputs
};

// The factors that a step sends.
enum class Factors { kPAndQ, kP, kQ };

// Runs the stages of one bucket of a fixed layout; never communicates. A step is the calls
//
//   project -> (sum the payload over ranks) -> orthogonalize -> back_project -> (sum) ->
//   reconstruct
//
// in this order, all on one thread or stream at a time. A step that sends one of the factors, in
// the alternating mode, does without back_project.
//
// Every rank must hold an equal plan and equal options. After an exception between project and
// reconstruct, `rollback` takes the states back to what they were before the step.
class BucketCompressor {
 public:
  // See make_compressor.
  BucketCompressor(BucketPlan plan, std::vector<ParameterStatePtr> states, const Options& options,
                   at::ScalarType gradient_type, at::Device device,
                   std::shared_ptr<StepCounter> step_counter);
  virtual ~BucketCompressor();
  BucketCompressor(const BucketCompressor&) = delete;
  BucketCompressor& operator=(const BucketCompressor&) = delete;

  // `gradient`: contiguous, plan.gradient_numel elements; kept until reconstruct or rollback.
  // Returns the P payload: [ P of each matrix | raw segments | activities | non-finite count ], in
  // the wire's dtype. In a step that sends Q alone, q in place of P.
  at::Tensor& project(const at::Tensor& gradient, const StepInfo& step);
  virtual void orthogonalize() = 0;
  // Returns the Q payload, of a step that sends both.
  virtual at::Tensor& back_project();
  void reconstruct();

  // Undoes project: memory = M - G, to within one rounding of M. The gradient is left as it is.
  void rollback();

  // Of the step in progress, or the last one.
  virtual Factors sends() const { return Factors::kPAndQ; }
  // Of all payloads of that step.
  virtual int64_t payload_bytes() const = 0;
  int64_t gradient_bytes() const;

  const BucketPlan& plan() const { return plan_; }
  // All that a step changes.
  const std::vector<ParameterStatePtr>& states() const { return states_; }

 protected:
  // Makes the payloads and tables, once the states are allocated.
  virtual void prepare() = 0;
  // project and reconstruct.
  virtual at::Tensor& project_gradient(const at::Tensor& gradient, const StepInfo& step) = 0;
  virtual void reconstruct_gradient() = 0;

  // To be called once memory is M: from here on there is something to roll back.
  void begin_step(const at::Tensor& gradient);
  at::ScalarType wire_type() const;
  at::TensorOptions factor_options() const;
  // `raw`: the raw segments, in all payloads that they travel in. To be called if the wire rounds.
  void keep_rounding_of(const at::Tensor& raw);
  // What is to be summed: what was rounded off of the raw segments before is added.
  at::Tensor& pack(WirePayload& payload);
  // As a step of both factors sees them; offsets are those of the plan.
  std::vector<kernels::Matrix> matrix_table() const;
  std::vector<kernels::RawSegment> raw_table() const;

  const BucketPlan plan_;
  const std::vector<ParameterStatePtr> states_;
  const Options options_;
  const at::ScalarType gradient_type_;
  const at::Device device_;
  const Stages& stages_;
  kernels::Bucket bucket_{};
  at::Tensor verdict_;

 private:
  void begin();
  double residual_scale(double grad_scale);

  const std::shared_ptr<StepCounter> step_counter_;
  bool prepared_ = false;
  at::Tensor gradient_;            // of the step in progress
  at::Tensor raw_, raw_residual_;  // what the wire has rounded off of raw_; undefined: nothing
};

// `states[i]` belongs to `plan.matrices[i]`. Buckets may share states, one after the other.
std::unique_ptr<BucketCompressor> make_compressor(
    BucketPlan plan, std::vector<ParameterStatePtr> states, const Options& options,
    at::ScalarType gradient_type, at::Device device,
    std::shared_ptr<StepCounter> step_counter = nullptr);

}  // namespace powersgd
