// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "powersgd/named_parameters.h"
#include "powersgd/options.h"
#include "powersgd/parameter_state.h"
#include "powersgd/session.h"

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
  double grad_scale = 1;                      // in whose units memory and q_local are
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

// Purpose: the state of each parameter of a model, and what belongs to all of them: the number of
// the step and the loss scale. It says how a checkpoint saves them, what the last step did, and
// takes a step back that the optimizer did not apply.
//
// Contract: every rank makes it of the same parameters with equal options. Only the engine's thread
// touches a state: whatever reads or changes one comes after all submitted steps.
//
// Ownership: shared by the model's BucketReducer, whose buckets share the single states.
//
// Threads: the user's thread, outside of the backward pass, unless a function says otherwise.
class ModelStates {
 public:
  // Allocates the state of every parameter that will be compressed, so that a job which lacks the
  // memory ends here and not after the exact steps.
  // With `previous`, the states of the same parameters in a former group, it takes these over and
  // empties them there. They are as the steps that the former group has ended have left them.
  ModelStates(std::shared_ptr<Session> session, NamedParameters parameters, Options options,
              ModelStates* previous = nullptr);
  ~ModelStates();

  const NamedParameters& parameters() const { return parameters_; }
  const Options& options() const { return options_; }
  // True if the options allow compression and any parameter is worth it.
  bool compresses() const { return compresses_; }
  // The number of the next step, and so that of the steps that have ended.
  int64_t step() const { return static_cast<int64_t>(step_); }

  // The loss scale of the gradients to come, which the host reads from the device.
  double grad_scale() const { return loss_scale_.item<double>(); }
  // Sets it in place and after all submitted steps, so that a replayed CUDA graph follows.
  void set_grad_scale(double scale);
  // Each step reads the scale from this tensor of one float32 when it runs.
  const at::Tensor& loss_scale() const { return loss_scale_; }
  // Makes `scale` that tensor. Its owner may change it between the steps.
  void set_loss_scale(const at::Tensor& scale);

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
  // ParameterState::mark_undelivered for `dropped`. The optimizer holds the parameters of these
  // indices; empty: all.
  void step_skipped(const at::Tensor& dropped = {}, const std::vector<size_t>& parameters = {});
  // Makes the state of each parameter what it was before the last step. Throws unless the options
  // have allow_discard.
  void discard_step();

  // Makes Q and the number of the step those of rank `source` of the group, which is at `step`.
  // Collective. The last step of this rank is still that which step_skipped() and discard_step()
  // speak of.
  void agree_with(int source, int64_t step);

  // The last step of each parameter. It takes a pass over the model, and the host waits for it.
  std::vector<LayerStats> layers();

  // For the reducer.

  const ParameterStatePtr& of(size_t index) const { return states_[index]; }
  // Adds residuals to gradients that are not compressed, each once: a checkpoint had them.
  void add_unsent_residuals(at::Tensor& bucket, const std::vector<size_t>& parameters,
                            const StepInfo& step);
  // Notes that a CUDA graph holds steps. The host does not see them replayed.
  void note_captured() { captured_ = true; }
  // Says that the next step has begun. Some of its buckets may never come.
  void begin_step() { step_begun_ = true; }
  void count_step() {
    ++step_;
    step_begun_ = false;
  }
  // Warns once of parameters of which the first rank sends little for long. `compressed`: the last
  // step was.
  void watch_captured(bool compressed);
  // The states on a device that all ranks must agree on.
  std::vector<Replica> replicas(c10::Device device) const;
  // Frees all states after all submitted steps, for good, unless a CUDA graph holds steps. Nothing
  // can be exported or loaded afterwards.
  void release();

 private:
  using States = std::vector<ParameterStatePtr>;
  void allocate();
  void take_over(ModelStates& previous);
  // Throws after release().
  void check_held() const;
  // Calls `change` for each device after all submitted steps, with those states of the parameters
  // on it that took part in the last step, which may not have ended. Empty: all parameters.
  void after_last_step(const std::vector<size_t>& parameters,
                       const std::function<void(c10::Device, const States&)>& change);
  void check_parameter(const ParameterExport& saved) const;
  bool is_compressed(size_t index) const;
  ParameterState::Layout layout_of(ParameterState& state, size_t index) const;
  // Allocates the state of a parameter that is_compressed(), if that has not been done.
  void start(ParameterState& state, size_t index) const;
  // A copy of a parameter's state. If it was never compressed, it is what it starts from.
  ParameterState started(size_t index) const;
  void load_parameter(size_t index, const ParameterExport& parameter, double grad_scale);
  void read_last_step(const ParameterState& state, LayerStats& layer) const;

  const std::shared_ptr<Session> session_;
  const NamedParameters parameters_;
  const Options options_;
  const bool compresses_;
  States states_;  // by index
  // Residuals that a checkpoint had of parameters that are not compressed, by index: [rows, cols],
  // unscaled. They are added to the next gradient.
  std::map<size_t, at::Tensor> unsent_residuals_;
  const at::Tensor own_scale_;
  at::Tensor loss_scale_;                        // own_scale_, or what set_loss_scale() got
  std::unique_ptr<CaptureWatch> capture_watch_;  // null once it has warned, and on other ranks
  std::atomic<uint64_t> step_ = 0;
  std::atomic<bool> step_begun_ = false;
  bool captured_ = false;
  bool released_ = false;
};

}  // namespace powersgd
