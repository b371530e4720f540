// SPDX-License-Identifier: BSD-3-Clause
//
// The state of an attached model: how it is saved and restored.
#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>

#include "compressor/streams.h"
#include "gradients/parameter_layout.h"
#include "powersgd/attached_model.h"

namespace powersgd {
namespace {

// The tensors of a state, each with that of its copy.
template <typename State, typename Local>
auto members(State& state, Local& local) {
  return std::array{std::pair{&state.memory, &local.memory}, std::pair{&state.p_hat, &local.p_hat},
                    std::pair{&state.q_local, &local.q_local},
                    std::pair{&state.q_warm, &local.q_warm}};
}

std::string describe(const at::Tensor& tensor) {
  return tensor.defined() ? c10::str(tensor.scalar_type(), " ", tensor.sizes()) : "nothing";
}

}  // namespace

std::vector<ParameterExport> AttachedModel::export_state() {
  std::vector<ParameterExport> exported(parameters_.size());
  for (size_t i = 0; i < parameters_.size(); ++i) {
    exported[i].name = names_[i];
    const at::Tensor& parameter = parameters_[i];
    check_layout(i);
    if (!is_compressed(parameter)) continue;
    std::vector<at::Tensor> mean(1);
    session_->run_after_steps(parameter.device(), [&] {
      const ParameterState state = started(i);
      mean[0] = state.residual().mul_(grad_scale() / state.grad_scale.item<double>());
      exported[i].q = q_to_parameter_order(state.q_warm.clone(), parameter);
    });
    session_->average_over_channel(mean);
    use_on_current_stream(mean[0]);
    use_on_current_stream(exported[i].q);
    exported[i].residual = to_parameter_order(mean[0], parameter);
  }
  return exported;
}

void AttachedModel::check_state(const std::vector<ParameterExport>& saved) const {
  for (const ParameterExport& parameter : saved) check_parameter(parameter);
}

void AttachedModel::load_state(const std::vector<ParameterExport>& saved, int64_t step,
                               double grad_scale) {
  check_state(saved);  // checks everything before anything is loaded
  for (const ParameterExport& parameter : saved) {
    if (!parameter.residual.defined()) continue;
    const auto index = find_name(parameter.name);
    if (!index) {
      session_->log(LogLevel::kWarning,
                    c10::str("the checkpoint's residual of '", parameter.name,
                             "' is dropped: the model has no such parameter, or it is frozen"));
    } else if (is_compressed(parameters_[*index])) {
      load_parameter(*index, parameter, grad_scale);
    } else {
      unsent_residuals_[*index] =
          to_memory_order(parameter.residual, parameters_[*index]) / grad_scale;
      session_->log(LogLevel::kInfo,
                    c10::str("'", parameter.name,
                             "' is not compressed with these options: the "
                             "checkpoint's residual of it is added to its next gradient"));
    }
  }
  step_ = static_cast<uint64_t>(step);
}

std::optional<size_t> AttachedModel::find_name(const std::string& name) const {
  const auto found = std::find(names_.begin(), names_.end(), name);
  if (found == names_.end()) return std::nullopt;
  return static_cast<size_t>(found - names_.begin());
}

void AttachedModel::check_parameter(const ParameterExport& saved) const {
  const auto index = find_name(saved.name);
  if (!index || !saved.residual.defined()) return;
  check_layout(*index);
  const at::Tensor& parameter = parameters_[*index];
  const MatrixShape shape = matrix_shape(memory_layout(parameter));
  TORCH_CHECK_VALUE(saved.residual.sizes() == parameter.sizes(), "residual of '", saved.name,
                    "' must have the parameter's shape ", parameter.sizes(), ", got ",
                    saved.residual.sizes());
  TORCH_CHECK_VALUE(saved.q.dim() == 2 && saved.q.size(1) == shape.cols, "q of '", saved.name,
                    "' must have the shape [rank, ", shape.cols, "], got ", saved.q.sizes());
}

bool AttachedModel::is_compressed(const at::Tensor& parameter) const {
  return should_compress(matrix_shape(memory_layout(parameter)), options_);
}

// A copy of a parameter's state. If it was never compressed, this is the state that it starts from.
ParameterState AttachedModel::started(size_t index) const {
  ParameterState state = *states_[index];
  start(state, parameters_[index]);
  return state;
}

void AttachedModel::start(ParameterState& state, const at::Tensor& parameter) const {
  if (state.allocated()) return;
  ParameterState::allocate({layout_of(state, parameter)}, options_, parameter.device());
}

ParameterState::Layout AttachedModel::layout_of(ParameterState& state,
                                                const at::Tensor& parameter) const {
  const MatrixShape shape = matrix_shape(memory_layout(parameter));
  return {&state, shape, effective_rank(shape, options_), parameter.scalar_type()};
}

void AttachedModel::load_parameter(size_t index, const ParameterExport& saved, double grad_scale) {
  const at::Tensor& parameter = parameters_[index];
  ParameterState& state = *states_[index];
  const at::Tensor residual = to_memory_order(saved.residual, parameter);
  const int64_t rank = effective_rank(matrix_shape(memory_layout(parameter)), options_);
  const at::Tensor q = q_to_memory_order(saved.q, parameter);
  const int64_t kept = std::min(rank, q.size(0));
  session_->run_after_steps(parameter.device(), [&] {
    start(state, parameter);
    state.set_residual(residual);
    state.grad_scale.fill_(grad_scale);
    state.q_warm.narrow(0, 0, kept).copy_(q.narrow(0, 0, kept));
    state.last_step.reset();
  });
  if (q.size(0) != rank) {
    session_->log(LogLevel::kInfo, c10::str("'", saved.name, "': the checkpoint's rank ", q.size(0),
                                            " factor was taken over at rank ", rank));
  }
}

std::vector<LocalExport> AttachedModel::export_local() {
  std::vector<LocalExport> exported;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!is_compressed(parameters_[i])) continue;
    LocalExport& local = exported.emplace_back();
    local.name = names_[i];
    session_->run_after_steps(parameters_[i].device(), [&] {
      const ParameterState state = started(i);
      local.grad_scale = state.grad_scale.item<double>();
      for (const auto& [from, to] : members(state, local)) {
        if (from->defined()) *to = from->clone();
      }
    });
    for (const auto& [from, to] : members(*states_[i], local)) use_on_current_stream(*to);
  }
  return exported;
}

void AttachedModel::check_local(const std::vector<LocalExport>& saved) const {
  for (const LocalExport& local : saved) {
    const auto index = find_name(local.name);
    TORCH_CHECK_VALUE(index, "the checkpoint's parameter '", local.name, "' is not in the model");
    TORCH_CHECK_VALUE(is_compressed(parameters_[*index]), "the checkpoint's parameter '",
                      local.name, "' is not compressed with these options");
    const ParameterState wanted = started(*index);
    for (const auto& [own, given] : members(wanted, local)) {
      TORCH_CHECK_VALUE(given->defined() == own->defined() &&
                            (!own->defined() || (given->sizes() == own->sizes() &&
                                                 given->scalar_type() == own->scalar_type())),
                        "the per-rank state of '", local.name,
                        "' was saved with other options: ", describe(*given),
                        " where these options want ", describe(*own),
                        ". state_dict without per_rank can be "
                        "loaded with any options");
    }
  }
}

void AttachedModel::load_local(const std::vector<LocalExport>& saved, int64_t step) {
  check_local(saved);
  for (const LocalExport& local : saved) {
    const size_t index = *find_name(local.name);
    ParameterState& state = *states_[index];
    session_->run_after_steps(parameters_[index].device(), [&] {
      start(state, parameters_[index]);
      for (const auto& [own, given] : members(state, local)) {
        if (own->defined()) own->copy_(*given);
      }
      state.grad_scale.fill_(local.grad_scale);
      state.last_step.reset();
    });
  }
  step_ = static_cast<uint64_t>(step);
}

void AttachedModel::after_last_step(const std::vector<size_t>& parameters,
                                    const std::function<void(c10::Device, const States&)>& change) {
  std::vector<size_t> indices = parameters;
  if (indices.empty()) {
    indices.resize(states_.size());
    std::iota(indices.begin(), indices.end(), size_t{0});
  }
  for (const c10::Device device : devices()) {
    session_->run_after_steps(device, [&] {
      // A pass that failed has projected some buckets and not ended its step.
      const auto is_of_open_step = [this](const auto& state) { return state->last_step == step_; };
      const bool open = std::any_of(states_.begin(), states_.end(), is_of_open_step);
      States states;
      for (const size_t i : indices) {
        const std::optional<uint64_t> last = states_[i]->last_step;
        const bool in_last_step = last && *last + (open ? 0 : 1) == step_;
        if (in_last_step && parameters_[i].device() == device) states.push_back(states_[i]);
      }
      change(device, states);
    });
  }
}

void AttachedModel::step_skipped(const at::Tensor& dropped, const std::vector<size_t>& parameters) {
  after_last_step(parameters, [&](c10::Device device, const States& delivered) {
    const bool elsewhere = dropped.defined() && !dropped.is_cpu() && dropped.device() != device;
    ParameterState::mark_undelivered(delivered, elsewhere ? dropped.to(device) : dropped);
  });
}

void AttachedModel::discard_step() {
  TORCH_CHECK_VALUE(options_.allow_discard,
                    "discard_step needs Options(allow_discard=True), with which each step keeps a "
                    "copy of the residuals before it");
  after_last_step({}, [this](c10::Device /*device*/, const States& states) {
    for (const ParameterStatePtr& state : states) {
      state->discard_step();
      // The host does not see the steps that a CUDA graph replays.
      if (captured_.empty()) state->last_step.reset();
    }
  });
}

}  // namespace powersgd
