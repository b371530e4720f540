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

#include "powersgd/compressor/parameter_state.h"
#include "powersgd/core/options.h"
#include "powersgd/group/session.h"
#include "powersgd/model/named_parameters.h"

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
  double grad_scale = 1;                      // the units of memory and q_local
};

// One parameter's last step on this rank. Norms are Frobenius norms in the loss scale's units.
struct LayerStats {
  std::string name;
  MatrixShape shape{};       // of the matrix
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

// Purpose: the state of each parameter of a model, and what they share: the step number and the
// loss scale. It saves and loads them, reports on the last step, and takes back a step that the
// optimizer did not apply.
//
// Contract: every rank makes it from the same parameters with equal options. Only the engine's
// thread touches a state: every read or change comes after all submitted steps.
//
// Ownership: shared by the model's BucketReducer, whose buckets share the single states.
//
// Threads: the user's thread, outside of the backward pass, unless a function says otherwise.
class ModelStates {
 public:
  // Allocates the state of every parameter that will be compressed, so a job without enough memory
  // fails here and not after the exact steps. If `previous` holds the states of the same parameters
  // in a former group, starts with copies of them, as that group's completed steps left them.
  ModelStates(std::shared_ptr<Session> session, NamedParameters parameters, Options options,
              const ModelStates* previous = nullptr);
  ~ModelStates();

  const NamedParameters& parameters() const { return parameters_; }
  const Options& options() const { return options_; }
  // True if the options allow compression and any parameter is worth it.
  bool compresses() const { return compresses_; }
  // The number of the next step, which is the number of steps that have ended.
  int64_t step() const { return static_cast<int64_t>(step_); }

  // The loss scale of the gradients to come, which the host reads from the device.
  double grad_scale() const { return loss_scale_.item<double>(); }
  // Sets the scale in place, after all submitted steps, so replayed CUDA graphs follow it.
  void set_grad_scale(double scale);
  // Each step reads the scale from this tensor of one float32 when it runs.
  const at::Tensor& loss_scale() const { return loss_scale_; }
  // Makes `scale` that tensor. Its owner may change it between steps.
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

  // Notes that the optimizer did not apply what the last step delivered, so the residuals keep it.
  // See ParameterState::mark_undelivered for `dropped`. `parameters` are the indices of the
  // optimizer's parameters; empty: all.
  void step_skipped(const at::Tensor& dropped = {}, const std::vector<size_t>& parameters = {});
  // Restores the state that each parameter had before the last step. Throws without allow_discard.
  void discard_step();

  // This rank's residuals: float32 tensors like the parameters, undefined for those without one.
  // In the units of the last step. The caller has waited for all steps of the parameters. Waits for
  // no others, nor for the device. The bits are the same until the next step.
  std::vector<at::Tensor> residuals() const;
  // Subtracts a share of the residuals of the parameters with these indices, because it was
  // delivered otherwise.
  void take_residuals(double share, const std::vector<size_t>& parameters);

  // Takes over Q and the step number of rank `source`, which is at `step`. Collective.
  // step_skipped() and discard_step() still refer to this rank's own last step.
  void agree_with(int source, int64_t step);

  // The last step of each parameter. Takes a pass over the model, for which the host waits.
  std::vector<LayerStats> layers();

  // For the reducer.

  const ParameterStatePtr& of(size_t index) const { return states_[index]; }
  // Adds residuals from a checkpoint to gradients that are not compressed, each once.
  void add_unsent_residuals(at::Tensor& bucket, const std::vector<size_t>& parameters,
                            const StepInfo& step);
  // Notes that a CUDA graph holds steps. The host does not see them replayed.
  void note_captured() { captured_ = true; }
  // Notes that the next step has begun. Some of its buckets may never come.
  void begin_step() { step_begun_ = true; }
  void count_step() {
    ++step_;
    step_begun_ = false;
  }
  // Warns once about parameters of which the first rank has long sent little. `compressed`: whether
  // the last step was.
  void watch_captured(bool compressed);
  // The states on a device that all ranks must agree on.
  std::vector<Replica> replicas(c10::Device device) const;
  // Permanently frees all states after all submitted steps, unless a CUDA graph holds steps.
  // Nothing can be exported or loaded afterwards.
  void release();

 private:
  using States = std::vector<ParameterStatePtr>;
  void allocate();
  void copy_states(const ModelStates& previous);
  // Throws after release().
  void check_held() const;
  // Calls `change` for each device after all submitted steps, with the states of the parameters
  // there that took part in the last step, even if it has not ended. Empty: all parameters.
  void after_last_step(const std::vector<size_t>& parameters,
                       const std::function<void(c10::Device, const States&)>& change);
  void check_parameter(const ParameterExport& saved) const;
  bool is_compressed(size_t index) const;
  ParameterState::Layout layout_of(ParameterState& state, size_t index) const;
  // Allocates the state of a parameter that is_compressed(), if that has not been done.
  void start(ParameterState& state, size_t index) const;
  // A copy of a parameter's state, or its initial state if it was never compressed.
  ParameterState started(size_t index) const;
  void load_parameter(size_t index, const ParameterExport& parameter, double grad_scale);
  void read_last_step(const ParameterState& state, LayerStats& layer) const;

  const std::shared_ptr<Session> session_;
  const NamedParameters parameters_;
  const Options options_;
  const bool compresses_;
  States states_;  // by index
  // A checkpoint's residuals of parameters that are not compressed, by index: [rows, cols],
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
