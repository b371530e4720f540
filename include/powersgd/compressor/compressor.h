// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "powersgd/compressor/dtypes.h"
#include "powersgd/compressor/parameter_state.h"
#include "powersgd/compressor/payload.h"
#include "powersgd/compressor/step_counter.h"
#include "powersgd/compressor/workspace.h"
#include "powersgd/core/options.h"
#include "powersgd/core/plan.h"

namespace powersgd {

// True if this build has the kernels of a device type.
bool has_kernels(c10::DeviceType device);

// How this rank has used a parameter in a pass.
enum class Use : int8_t {
  kUsed,
  kUnused,  // its gradient is zero
  kStale,   // unused, and its gradient is left from an earlier pass
};

// The facts of one step that the stages need.
struct StepInfo {
  double output_scale = 1;  // 1 for SUM, 1 / world size for AVG
  double units = 1;         // the gradient is this many times the mean gradient at its loss scale
  uint64_t step = 0;
  int64_t bucket = 0;  // the bucket's number in the pass, which a profiler shows
  // The loss scale: one float32 on the gradient's device, which project reads. It does not change
  // until the step ends. Undefined: 1.
  at::Tensor loss_scale = {};
  std::vector<Use> uses = {};  // by parameter of the bucket; empty: this rank has used all
};

// Runs the stages of one bucket of a fixed layout.
//
// Purpose: a step is the calls
//
//   project -> (sum the payload over ranks) -> orthogonalize -> back_project -> (sum) ->
//   reconstruct
//
// in this order.
//
// Contract: it never communicates. The caller sums a payload as its schedule says. Every rank holds
// an equal plan and equal options. After an exception between project and reconstruct, `rollback`
// restores the residuals.
//
// Ownership: it owns the payloads, and shares the states with every other bucket that has them. It
// keeps the gradient until reconstruct or rollback.
//
// Threads: one thread or stream at a time. Compressors that share a state run one after the other.
class BucketCompressor {
 public:
  BucketCompressor() = default;
  virtual ~BucketCompressor() = default;
  BucketCompressor(const BucketCompressor&) = delete;
  BucketCompressor& operator=(const BucketCompressor&) = delete;

  // Allocates everything that the steps need, once. The host does not wait for the device. If
  // nobody has called it, the first project() does.
  virtual void prepare() = 0;

  // `gradient` is contiguous and has plan.gradient_numel elements. Returns the P payload:
  //   [ P of each matrix | raw segments | uses | non-finite count ]
  virtual Payload& project(const at::Tensor& gradient, const StepInfo& step) = 0;
  virtual void orthogonalize() = 0;
  // Returns the Q payload.
  virtual Payload& back_project() = 0;
  // Replaces the gradient with the output. If no rank has used a parameter, its gradient and
  // residual stay unchanged.
  virtual void reconstruct() = 0;

  // Undoes project to within one rounding of M. The gradient stays unchanged.
  virtual void rollback() = 0;

  // The bytes of both payloads on the wire, as elements or as this rank's packets. In two levels,
  // those of all ranks of a host, because each sends a slice.
  virtual int64_t payload_bytes() const = 0;
  // True if a payload has a host().
  virtual bool in_two_levels() const = 0;
  virtual int64_t gradient_bytes() const = 0;
  // The largest rank of the bucket's matrices.
  virtual int64_t approximation_rank() const = 0;

  // All states that a step changes.
  virtual std::vector<ParameterStatePtr> states() const = 0;
};

// The bytes that a bucket takes on its device besides the gradient. Nothing else is allocated there
// except a few bytes per model: its step counts, and for each state a loss scale and the norms of
// Q's rows. Where torch does the products, it also allocates temporaries.
//
// The buckets of a model share two workspaces, each sized for the largest bucket.
struct MemoryNeeds {
  int64_t residual = 0;
  int64_t factors = 0;   // kept from step to step
  int64_t payloads = 0;  // with their packets
  int64_t tables = 0;    // of the kernels, which depend on the device type
  int64_t workspace = 0;

  // What no other bucket shares.
  int64_t own() const { return residual + factors + payloads + tables; }
};
MemoryNeeds memory_needs(const BucketPlan& plan, const Options& options,
                         at::ScalarType gradient_type, c10::DeviceType device, Ranks ranks = {});

// `states[i]` belongs to `plan.matrices[i]`. Buckets may share states, one after the other.
// `workspaces` are the model's on this device. A bucket that shares none has its own.
std::unique_ptr<BucketCompressor> make_compressor(
    BucketPlan plan, std::vector<ParameterStatePtr> states, const Options& options,
    at::ScalarType gradient_type, at::Device device, Ranks ranks = {},
    std::shared_ptr<StepCounter> step_counter = nullptr,
    Workspaces workspaces = Workspaces::of_one_bucket());

}  // namespace powersgd
