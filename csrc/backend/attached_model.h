// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/csrc/distributed/c10d/comm.hpp>

#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "powersgd/backend.h"

namespace powersgd {

// What a checkpoint holds of one parameter.
struct ParameterExport {
  std::string name;
  at::Tensor residual;  // mean over ranks, of the parameter's shape; undefined if never compressed
  at::Tensor q;         // [rank, cols], the columns in the order of a contiguous parameter
};

// One DistributedDataParallel module whose buckets are compressed layer by layer: the state of each
// of its parameters, and the compressor of each bucket layout that DDP has used.
//
// Owns its backend; owned by the comm hook that DDP's Reducer owns. reduce() is called by one
// thread at a time (DDP's backward); the rest by the user's thread outside of backward.
class AttachedModel : public std::enable_shared_from_this<AttachedModel> {
 public:
  AttachedModel(c10::intrusive_ptr<BackendPowerSGD> backend, std::vector<std::string> names,
                std::vector<at::Tensor> parameters, Options options);

  // The sum of the bucket over ranks, divided by `divisor` (the number of ranks, but for DDP's join),
  // in the bucket. Called for every bucket in DDP's order.
  c10::intrusive_ptr<c10d::Work> reduce(c10d::GradBucket& bucket, int divisor);

  // While inactive (detached), buckets are averaged exactly.
  void set_active(bool active) { active_ = active; }
  bool active() const { return active_; }

  // Collective: the same on all ranks when it returns.
  std::vector<ParameterExport> export_state();
  // Parameters that are not named keep what they have. Throws, before it changes anything, if a
  // residual or q is missing or of another shape.
  void load_state(const std::vector<ParameterExport>& parameters, int64_t step, double grad_scale);

  // The Frobenius norm of each parameter's residual on this rank; 0 where there is none.
  std::map<std::string, double> residual_norms();

  int64_t step() const { return static_cast<int64_t>(step_); }
  double grad_scale() const;
  const Options& options() const { return options_; }
  const c10::intrusive_ptr<BackendPowerSGD>& backend() const { return backend_; }

 private:
  struct Bucket {
    std::vector<size_t> parameters;  // indices into parameters_
    BucketPlan plan;
    std::shared_ptr<BucketCompressor> compressor;  // null if nothing in it is compressed
  };

  Bucket& find_bucket(c10d::GradBucket& bucket);
  Bucket make_bucket(c10d::GradBucket& bucket, std::vector<size_t> indices) const;
  void announce() const;
  void end_step();
  bool may_load(size_t index, const ParameterExport& saved) const;
  void load_parameter(size_t index, const ParameterExport& parameter, double grad_scale);

  const c10::intrusive_ptr<BackendPowerSGD> backend_;
  const std::vector<std::string> names_;
  const std::vector<at::Tensor> parameters_;
  const Options options_;
  const std::shared_ptr<SkipCounter> skips_;
  std::vector<ParameterStatePtr> states_;
  std::unordered_map<const c10::TensorImpl*, size_t> index_of_;
  std::map<size_t, Bucket> buckets_;  // by DDP's bucket index
  uint64_t step_ = 0;
  bool active_ = true;
  bool announced_ = false;
};

}  // namespace powersgd
