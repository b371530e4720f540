// SPDX-License-Identifier: BSD-3-Clause
#include "powersgd/model/model_states.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "compressor/streams.h"
#include "group/replicas.h"
#include "model/capture_watch.h"
#include "model/parameter_layout.h"
#include "powersgd/model/outline.h"

namespace powersgd {

ModelStates::ModelStates(std::shared_ptr<Session> session, NamedParameters parameters,
                         Options options, const ModelStates* previous)
    : session_(std::move(session)),
      parameters_(std::move(parameters)),
      options_(std::move(options)),
      compresses_(options_.scope != Scope::kNever &&
                  outline_of(parameters_, options_).compressed_parameters > 0),
      own_scale_(at::ones({}, at::device(parameters_.device()).dtype(at::kFloat))),
      loss_scale_(own_scale_),
      capture_watch_(session_->rank() == 0 ? std::make_unique<CaptureWatch>() : nullptr) {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    states_.push_back(std::make_shared<ParameterState>(i));
  }
  if (previous != nullptr) copy_states(*previous);
  if (session_->size() > 1 && options_.scope != Scope::kNever) allocate();
}

ModelStates::~ModelStates() = default;

void ModelStates::allocate() {
  for (const c10::Device device : parameters_.devices()) {
    if (!has_kernels(device.type())) continue;
    std::vector<ParameterState::Layout> layouts;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      const bool here = parameters_[i].device() == device && !states_[i]->allocated();
      if (here && is_compressed(i)) layouts.push_back(layout_of(*states_[i], i));
    }
    if (!layouts.empty()) {
      // The memory belongs to the engine's stream, as the buckets' does.
      session_->run_after_steps(device,
                                [&] { ParameterState::allocate(layouts, options_, device); });
    }
    if (compresses_) session_->connect(device);
  }
}

// Copies, because memory belongs to the streams of an engine, and because `previous` goes on if the
// other ranks turn out to be gone. Its states are final by then: run_after_steps waits for what an
// ended engine still runs.
void ModelStates::copy_states(const ModelStates& previous) {
  TORCH_INTERNAL_ASSERT(previous.parameters_.names() == parameters_.names());
  TORCH_CHECK_VALUE(!previous.captured_,
                    "a CUDA graph holds steps of the previous compression, so its residuals cannot "
                    "move to another group: drop the graph, or use state_dict and "
                    "load_state_dict");
  previous.check_held();
  for (const c10::Device device : parameters_.devices()) {
    previous.session_->run_after_steps(device, [] {});
    session_->run_after_steps(device, [&] {
      for (size_t i = 0; i < states_.size(); ++i) {
        if (parameters_[i].device() == device) *states_[i] = previous.states_[i]->copy();
      }
    });
  }
  unsent_residuals_ = previous.unsent_residuals_;
  set_grad_scale(previous.grad_scale());
  step_ = previous.step_.load();
  step_begun_ = previous.step_begun_.load();
}

bool ModelStates::is_compressed(size_t index) const {
  return should_compress(parameters_.shape(index), options_);
}

ParameterState::Layout ModelStates::layout_of(ParameterState& state, size_t index) const {
  const ParameterShape shape = parameters_.shape(index);
  return {&state, matrix_shape(shape), effective_rank(shape, options_)};
}

void ModelStates::start(ParameterState& state, size_t index) const {
  if (state.allocated()) return;
  ParameterState::allocate({layout_of(state, index)}, options_, parameters_[index].device());
}

ParameterState ModelStates::started(size_t index) const {
  ParameterState state = *states_[index];
  start(state, index);
  return state;
}

void ModelStates::set_grad_scale(double scale) {
  const auto rounded = static_cast<float>(scale);
  TORCH_CHECK_VALUE(rounded > 0 && std::isfinite(rounded),
                    "grad_scale must be a finite number > 0, got ", scale);
  session_->run_after_steps(own_scale_.device(), [&] { own_scale_.fill_(rounded); });
  loss_scale_ = own_scale_;
}

void ModelStates::set_loss_scale(const at::Tensor& scale) {
  TORCH_CHECK_VALUE(scale.numel() == 1 && scale.scalar_type() == at::kFloat,
                    "loss_scale must be a tensor of one float32 element, got ", scale.scalar_type(),
                    " ", scale.sizes());
  loss_scale_ = scale;
}

// Every rank adds the mean residual once it uses the parameter, so the averages contain it once.
// The output of a parameter that no rank uses would be dropped.
void ModelStates::add_unsent_residuals(at::Tensor& bucket, const std::vector<size_t>& parameters,
                                       const StepInfo& step) {
  if (unsent_residuals_.empty()) return;
  const std::vector<at::Tensor> gradients = parameters_.split(bucket, parameters);
  for (size_t i = 0; i < gradients.size(); ++i) {
    const auto residual = unsent_residuals_.find(parameters[i]);
    const bool used = step.uses.empty() || step.uses[i] == Use::kUsed;
    if (!used || residual == unsent_residuals_.end()) continue;
    const at::Tensor added = residual->second.to(bucket.device()).flatten();
    gradients[i].add_(added.mul(step.loss_scale), step.units);
    unsent_residuals_.erase(residual);
  }
}

std::vector<Replica> ModelStates::replicas(c10::Device device) const {
  std::vector<Replica> replicas;
  for (size_t i = 0; i < states_.size(); ++i) {
    if (parameters_[i].device() != device) continue;
    replicas.push_back({"'" + parameters_.names()[i] + "'", states_[i]});
  }
  return replicas;
}

void ModelStates::after_last_step(const std::vector<size_t>& parameters,
                                  const std::function<void(c10::Device, const States&)>& change) {
  std::vector<size_t> indices = parameters;
  if (indices.empty()) {
    indices.resize(states_.size());
    std::iota(indices.begin(), indices.end(), size_t{0});
  }
  for (const c10::Device device : parameters_.devices()) {
    session_->run_after_steps(device, [&] {
      States states;
      for (const size_t i : indices) {
        const std::optional<uint64_t> last = states_[i]->last_step;
        // A pass that failed has begun its step but not ended it.
        const bool in_last_step = last && *last + (step_begun_ ? 0 : 1) == step_;
        if (in_last_step && parameters_[i].device() == device) states.push_back(states_[i]);
      }
      change(device, states);
    });
  }
}

void ModelStates::step_skipped(const at::Tensor& dropped, const std::vector<size_t>& parameters) {
  after_last_step(parameters, [&](c10::Device device, const States& delivered) {
    const bool elsewhere = dropped.defined() && !dropped.is_cpu() && dropped.device() != device;
    ParameterState::mark_undelivered(delivered, elsewhere ? dropped.to(device) : dropped);
  });
}

void ModelStates::discard_step() {
  TORCH_CHECK_VALUE(options_.allow_discard,
                    "discard_step needs Options(allow_discard=True), which keeps a copy of the "
                    "residuals from before each step");
  after_last_step({}, [this](c10::Device /*device*/, const States& states) {
    for (const ParameterStatePtr& state : states) {
      state->discard_step();
      if (!captured_) state->last_step.reset();
    }
  });
}

std::vector<at::Tensor> ModelStates::residuals() const {
  check_held();
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> found(states_.size()), copies, memories;
  for (size_t i = 0; i < states_.size(); ++i) {
    const ParameterState& state = *states_[i];
    if (!state.memory.defined()) continue;
    for (const at::Tensor* read : {&state.memory, &state.p_hat, &state.q_local}) {
      use_on_current_stream(*read);
    }
    memories.push_back(state.memory);
    copies.push_back(at::empty_like(state.memory, at::kFloat));
    found[i] = copies.back().view(parameters_[i].sizes());
  }
  if (copies.empty()) return found;
  at::_foreach_copy_(copies, memories);
  for (size_t i = 0, k = 0; i < states_.size(); ++i) {
    const ParameterState& state = *states_[i];
    if (state.memory.defined()) copies[k++].addmm_(state.p_hat, state.q_local, 1, -1);
  }
  return found;
}

void ModelStates::take_residuals(double share, const std::vector<size_t>& parameters) {
  check_held();
  const std::vector<at::Tensor> found = share < 1 ? residuals() : std::vector<at::Tensor>();
  for (const c10::Device device : parameters_.devices()) {
    session_->run_after_steps(device, [&] {
      for (const size_t i : parameters) {
        ParameterState& state = *states_[i];
        if (!state.memory.defined() || parameters_[i].device() != device) continue;
        state.last_step.reset();
        if (found.empty()) {
          state.drop_residual();
          continue;
        }
        use_on_current_stream(found[i]);
        // What was delivered is a share of a product that TF32 may have rounded.
        const at::Tensor taken = found[i].view(state.memory.sizes());
        state.set_residual(state.residual().sub_(taken, share));
      }
    });
  }
}

void ModelStates::agree_with(int source, int64_t step) {
  const auto agreed = static_cast<uint64_t>(step);
  for (const ParameterStatePtr& state : states_) {
    if (state->last_step) *state->last_step += agreed - step_;
  }
  step_ = agreed;
  if (session_->size() == 1) return;
  for (const c10::Device device : parameters_.devices()) {
    std::vector<Replica> all = replicas(device);
    // P^ may belong to a different step on each rank, and goes with the rank's own residual.
    for (Replica& replica : all) replica.has_p = false;
    session_->share_replicas(std::move(all), device, source);
  }
}

void ModelStates::watch_captured(bool compressed) {
  if (!capture_watch_) return;
  const std::vector<ParameterStatePtr> low = capture_watch_->low();
  if (!low.empty()) {
    std::vector<std::string> names;
    for (size_t i = 0; i < states_.size(); ++i) {
      if (std::find(low.begin(), low.end(), states_[i]) != low.end()) {
        names.push_back(parameters_.names()[i]);
      }
    }
    session_->log(LogLevel::kWarning, low_capture_warning(names));
    capture_watch_ = nullptr;
  } else if (compressed && step_ % CaptureWatch::kInterval == 0) {
    for (const c10::Device device : parameters_.devices()) {
      States states;
      for (const Replica& replica : replicas(device)) states.push_back(replica.state);
      capture_watch_->sample(*session_, device, states);
    }
  }
}

void ModelStates::check_held() const {
  TORCH_CHECK_VALUE(!released_,
                    "detach() has freed the residuals and factors of this module: call "
                    "state_dict() before detach()");
}

void ModelStates::release() {
  if (captured_) return;
  released_ = true;
  for (const c10::Device device : parameters_.devices()) {
    session_->run_after_steps(device, [&] {
      for (const Replica& replica : replicas(device)) replica.state->release();
    });
  }
  unsent_residuals_.clear();
}

}  // namespace powersgd
