// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "powersgd/session.h"
#include "powersgd/workspace.h"

namespace powersgd {

class CaptureWatch;

// One parameter's state in a checkpoint that all ranks share.
struct ParameterExport {
  std::string name;
  at::Tensor residual;  // mean over ranks, in the parameter's shape; undefined if it has none
  at::Tensor q;         // [rank, cols], the columns in the order of a contiguous parameter
};

// One parameter's state in one rank's own checkpoint.
struct LocalExport {
  std::string name;
  at::Tensor memory, p_hat, q_local, q_warm;  // memory: undefined without error feedback
  double grad_scale = 1;
};

// The sizes of a compressed step of a model in which all parameters have gradients.
struct Outline {
  int64_t parameters = 0;             // parameters that have gradients
  int64_t compressed_parameters = 0;  // of these, as low-rank factors
  int64_t numel = 0;                  // elements of the gradients
  int64_t compressed_numel = 0;       // of these, as low-rank factors
  int64_t sent_numel = 0;             // elements sent in their place, if they are in one bucket
  int64_t bytes_before = 0;
  int64_t bytes_after = 0;
};

// One parameter's last step on this rank. Norms are Frobenius norms in the loss scale's units.
struct LayerStats {
  std::string name;
  MatrixShape shape{};       // that of the matrix
  int64_t rank = 0;          // 0: sent raw
  int64_t bytes_before = 0;  // of the gradient
  int64_t bytes_after = 0;   // sent in its place
  double residual = 0;       // the norm of the residual
  // The norm of the averaged gradient that the step delivered. Empty if it delivered nothing.
  std::optional<double> gradient;
  // The share of M = gradient + residual that this rank sent, by squared norms. Empty if nothing
  // was delivered, or without error feedback.
  std::optional<double> captured;
};

// Purpose: one module whose buckets of gradients are compressed layer by layer. It has the state of
// each parameter, and the compressor of each bucket layout that has been used. The buckets are
// DDP's, or the shards that FSDP2 has reduce-scattered.
//
// Contract: every rank attaches the same parameters with equal options, and reduces the same
// buckets in the same order.
//
// Ownership: owned by the hook that is called with the buckets. Shares the session of its group.
//
// Threads: one thread at a time calls the reductions and end_step(), in the backward pass. The
// user's thread calls everything else, outside of it.
class AttachedModel {
 public:
  ~AttachedModel();
  // Makes a model and adds it to `session`.
  static std::shared_ptr<AttachedModel> attach(const std::shared_ptr<Session>& session,
                                               std::vector<std::string> names,
                                               const std::vector<at::Tensor>& parameters,
                                               Options options);
  AttachedModel(std::shared_ptr<Session> session, std::vector<std::string> names,
                const std::vector<at::Tensor>& parameters, Options options);

  // Returns each parameter's index in the constructor's list.
  std::vector<size_t> find(const std::vector<at::Tensor>& parameters) const;

  // Makes `buffer` its sum over ranks divided by `divisor`: the number of ranks, except in DDP's
  // join. It holds the gradients of `parameters` one after the other. If none are named, it is
  // averaged exactly. `bucket` is its number. If `more_follow`, the caller promises to reduce
  // another bucket or to call end_step(), in the same backward pass. `uses` says which parameters
  // this rank has used in the pass; empty: all.
  c10::intrusive_ptr<c10d::Work> reduce(size_t bucket, at::Tensor& buffer,
                                        const std::vector<size_t>& parameters, int divisor,
                                        bool more_follow = false, std::vector<Use> uses = {});
  // Announces an all-reduce of `buffer` that its owner makes, in place of reduce(). The owner then
  // divides the result by `divided_after`. It replaces the announcement before.
  void expect(size_t bucket, const at::Tensor& buffer, std::vector<size_t> parameters,
              double divided_after);
  bool expects(const at::Tensor& buffer) const;
  // Does the all-reduce of the buffer that the model expects. Null if the caller is to do it,
  // exactly.
  c10::intrusive_ptr<c10d::Work> reduce_expected(const at::Tensor& buffer,
                                                 const c10d::AllreduceOptions& opts);
  // Called after the last bucket of a backward pass.
  void end_step();
  // Called in its place if the pass failed after some buckets, whose outputs nobody got.
  void abandon_step();

  // An inactive (detached) model averages its buckets exactly.
  void set_active(bool active) { active_ = active; }
  bool active() const { return active_; }

  // Collective. The result is the same on all ranks.
  std::vector<ParameterExport> export_state();
  // Parameters that are not named keep their state. Throws before it changes anything if a residual
  // or a factor has another shape. check_state() only checks.
  void check_state(const std::vector<ParameterExport>& saved) const;
  void load_state(const std::vector<ParameterExport>& saved, int64_t step, double grad_scale);

  // The same for this rank's own state, which is restored bit for bit. Not collective.
  std::vector<LocalExport> export_local();
  void check_local(const std::vector<LocalExport>& saved) const;
  void load_local(const std::vector<LocalExport>& saved, int64_t step);

  // Says that the optimizer did not apply what the last step delivered: the residuals keep it. See
  // ParameterState::mark_undelivered for `dropped`.
  // The optimizer holds the parameters of these indices; empty: all.
  void step_skipped(const at::Tensor& dropped = {}, const std::vector<size_t>& parameters = {});
  // Makes the state of each parameter what it was before the last step. Throws unless the options
  // have allow_discard.
  void discard_step();

  // The last step of each parameter. It takes a pass over the model, and the host waits for it.
  std::vector<LayerStats> layers();

  Outline outline() const;
  // True if the options allow compression and any parameter is worth it, as found at attach.
  bool compresses() const { return compresses_; }
  // True if the exact steps are over and the model is not detached.
  bool warm() const {
    return active_ && step_ >= static_cast<uint64_t>(options_.start_powerSGD_iter);
  }

  int64_t step() const { return static_cast<int64_t>(step_); }
  // The loss scale of the gradients to come: the model's own if it was set, else the session's. The
  // host waits for the device if the scale is a tensor.
  double grad_scale() const;
  void set_grad_scale(double scale);
  // Makes the device read the loss scale of each step from `scale`, one float32. No scale that was
  // set counts then. The caller may change it between the steps. An undefined tensor ends that.
  void set_loss_scale(const at::Tensor& scale);
  const at::Tensor& loss_scale() const { return loss_scale_; }
  const std::vector<std::string>& names() const { return names_; }
  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  const Options& options() const { return options_; }
  Session& session() const { return *session_; }

 private:
  struct Bucket {
    bool holds(const at::Tensor& buffer, const std::vector<size_t>& which) const {
      return which == parameters && dtype == buffer.scalar_type() && device == buffer.device();
    }

    std::vector<size_t> parameters;  // indices into parameters_
    at::ScalarType dtype = at::kFloat;
    c10::Device device = at::kCPU;
    std::shared_ptr<BucketCompressor> compressor;  // null if nothing in it is compressed
  };
  struct Expected;
  struct Reduction {
    std::shared_ptr<BucketCompressor> compressor;  // null: exact
    StepInfo step;
  };

  // Allocates the state of every parameter that will be compressed, so that a job which lacks the
  // memory ends here and not after the exact steps.
  void allocate_states();
  std::shared_ptr<BucketCompressor> find_compressor(size_t bucket, const at::Tensor& buffer,
                                                    const std::vector<size_t>& parameters);
  Bucket make_bucket(const at::Tensor& buffer, const std::vector<size_t>& parameters);
  // Those that all buckets on the device share.
  const Workspaces& workspaces_on(c10::Device device);
  // Makes the buffer ready for its all-reduce. The mean gradient is the mean of the ranks' buffers
  // divided by `units`.
  Reduction begin(size_t bucket, at::Tensor& buffer, const std::vector<size_t>& parameters,
                  std::vector<Use> uses, double output_scale, double units);
  StepInfo next_step(const at::Tensor& buffer, double output_scale, double units) const;
  void announce() const;
  // The devices of the parameters: one, unless the module is spread over several.
  std::vector<c10::Device> devices() const;
  // Calls `change` for each device after all submitted steps, with those states of the parameters
  // on it that took part in the last step, which may not have ended. Empty: all parameters.
  using States = std::vector<ParameterStatePtr>;
  void after_last_step(const std::vector<size_t>& parameters,
                       const std::function<void(c10::Device, const States&)>& change);
  // An old gradient that is not finite must not skip the step of the whole bucket.
  void clear_stale_non_finite(at::Tensor& buffer, const std::vector<size_t>& parameters,
                              const std::vector<Use>& uses) const;
  void add_unsent_residuals(at::Tensor& buffer, const std::vector<size_t>& parameters,
                            const StepInfo& step);
  std::optional<size_t> find_name(const std::string& name) const;
  void check_layout(size_t index) const;
  void check_parameter(const ParameterExport& saved) const;
  bool is_compressed(const at::Tensor& parameter) const;
  ParameterState started(size_t index) const;
  ParameterState::Layout layout_of(ParameterState& state, const at::Tensor& parameter) const;
  // Allocates the state of a parameter that is_compressed(), if that has not been done.
  void start(ParameterState& state, const at::Tensor& parameter) const;
  void load_parameter(size_t index, const ParameterExport& parameter, double grad_scale);
  void read_last_step(const ParameterState& state, LayerStats& layer) const;
  // Warns once of parameters of which the first rank sends little for long.
  void watch_captured();

  const std::shared_ptr<Session> session_;
  const std::vector<std::string> names_;
  const std::vector<at::Tensor> parameters_;  // complex ones as pairs of real numbers
  const Options options_;
  const std::shared_ptr<StepCounter> step_counter_;
  std::unordered_map<c10::Device, Workspaces> workspaces_;
  std::vector<ParameterStatePtr> states_;
  std::vector<std::vector<int64_t>> strides_;  // of each parameter in attach; empty: contiguous
  std::unordered_map<const c10::TensorImpl*, size_t> index_of_;
  std::map<size_t, Bucket> buckets_;  // by the bucket's number
  // The compressors of steps that a CUDA graph holds. A replay uses their memory, even if DDP has
  // rebuilt its buckets since.
  std::set<std::shared_ptr<BucketCompressor>> captured_;
  // Residuals that a checkpoint had of parameters that are not compressed, by index: [rows, cols],
  // unscaled. They are added to the next gradient.
  std::map<size_t, at::Tensor> unsent_residuals_;
  std::shared_ptr<const Expected> expected_;
  std::unique_ptr<CaptureWatch> capture_watch_;  // null once it has warned, and on other ranks
  bool compresses_ = false;
  std::atomic<uint64_t> step_ = 0;
  std::optional<double> grad_scale_;
  at::Tensor loss_scale_;  // undefined: grad_scale() counts
  std::atomic<bool> active_ = true;
  bool announced_ = false;
  bool warned_of_unknown_ = false;
};

}  // namespace powersgd
