// SPDX-License-Identifier: BSD-3-Clause
//
// The states of a model in checkpoints.
#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <utility>

#include "compressor/streams.h"
#include "model/parameter_layout.h"
#include "powersgd/model/model_states.h"

namespace powersgd {
namespace {

// The tensors of a state, each paired with its copy.
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

std::vector<ParameterExport> ModelStates::export_state() {
  check_held();
  std::vector<ParameterExport> exported(parameters_.size());
  for (size_t i = 0; i < parameters_.size(); ++i) {
    exported[i].name = parameters_.names()[i];
    const at::Tensor& parameter = parameters_[i];
    parameters_.check_layout(i);
    if (!is_compressed(i)) continue;
    std::vector<at::Tensor> mean(1);
    session_->run_after_steps(parameter.device(), [&] {
      const ParameterState state = started(i);
      mean[0] = state.residual().mul_(grad_scale() / state.memory_units.item<double>());
      exported[i].q = q_to_parameter_order(state.q_warm.clone(), parameter);
    });
    session_->average_after_steps(mean);
    use_on_current_stream(mean[0]);
    use_on_current_stream(exported[i].q);
    exported[i].residual = to_parameter_order(mean[0], parameter);
  }
  return exported;
}

void ModelStates::check_state(const std::vector<ParameterExport>& saved) const {
  check_held();
  for (const ParameterExport& parameter : saved) check_parameter(parameter);
}

void ModelStates::load_state(const std::vector<ParameterExport>& saved, int64_t step,
                             double grad_scale) {
  check_state(saved);  // checks everything before anything is loaded
  for (const ParameterExport& parameter : saved) {
    if (!parameter.residual.defined()) continue;
    const auto index = parameters_.find_name(parameter.name);
    if (!index) {
      session_->log(LogLevel::kWarning,
                    c10::str("the checkpoint's residual of '", parameter.name,
                             "' is dropped, because the model has no such parameter or it is "
                             "frozen"));
    } else if (is_compressed(*index)) {
      load_parameter(*index, parameter, grad_scale);
    } else {
      unsent_residuals_[*index] =
          to_memory_order(parameter.residual, parameters_[*index]) / grad_scale;
      session_->log(LogLevel::kInfo,
                    c10::str("'", parameter.name,
                             "' is not compressed with these options, so the checkpoint's "
                             "residual is added to its next gradient"));
    }
  }
  step_ = static_cast<uint64_t>(step);
}

void ModelStates::check_parameter(const ParameterExport& saved) const {
  const auto index = parameters_.find_name(saved.name);
  if (!index || !saved.residual.defined()) return;
  parameters_.check_layout(*index);
  const at::Tensor& parameter = parameters_[*index];
  const MatrixShape shape = matrix_shape(memory_layout(parameter));
  TORCH_CHECK_VALUE(saved.residual.sizes() == parameter.sizes(), "residual of '", saved.name,
                    "' must have the parameter's shape ", parameter.sizes(), ", got ",
                    saved.residual.sizes());
  TORCH_CHECK_VALUE(saved.q.dim() == 2 && saved.q.size(1) == shape.cols, "q of '", saved.name,
                    "' must have the shape [rank, ", shape.cols, "], got ", saved.q.sizes());
}

void ModelStates::load_parameter(size_t index, const ParameterExport& saved, double grad_scale) {
  const at::Tensor& parameter = parameters_[index];
  ParameterState& state = *states_[index];
  const at::Tensor residual = to_memory_order(saved.residual, parameter);
  const int64_t rank = effective_rank(parameters_.shape(index), options_);
  const at::Tensor q = q_to_memory_order(saved.q, parameter);
  const int64_t kept = std::min(rank, q.size(0));
  session_->run_after_steps(parameter.device(), [&] {
    start(state, index);
    state.set_residual(residual);
    state.memory_units.fill_(grad_scale);
    state.q_warm.narrow(0, 0, kept).copy_(q.narrow(0, 0, kept));
    state.last_step.reset();
  });
  if (q.size(0) != rank) {
    session_->log(LogLevel::kInfo,
                  c10::str("'", saved.name, "': the checkpoint's factor of matrix rank ", q.size(0),
                           " was converted to rank ", rank));
  }
}

std::vector<LocalExport> ModelStates::export_local() {
  check_held();
  std::vector<LocalExport> exported;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!is_compressed(i)) continue;
    LocalExport& local = exported.emplace_back();
    local.name = parameters_.names()[i];
    session_->run_after_steps(parameters_[i].device(), [&] {
      const ParameterState state = started(i);
      local.grad_scale = state.memory_units.item<double>();
      for (const auto& [from, to] : members(state, local)) {
        if (from->defined()) *to = from->clone();
      }
    });
    for (const auto& [from, to] : members(*states_[i], local)) use_on_current_stream(*to);
  }
  return exported;
}

void ModelStates::check_local(const std::vector<LocalExport>& saved) const {
  check_held();
  for (const LocalExport& local : saved) {
    const auto index = parameters_.find_name(local.name);
    TORCH_CHECK_VALUE(index, "the checkpoint's parameter '", local.name, "' is not in the model");
    TORCH_CHECK_VALUE(is_compressed(*index), "the checkpoint's parameter '", local.name,
                      "' is not compressed with these options: load it with the same options, or "
                      "save without per_rank");
    const ParameterState wanted = started(*index);
    for (const auto& [own, given] : members(wanted, local)) {
      TORCH_CHECK_VALUE(
          given->defined() == own->defined() &&
              (!own->defined() ||
               (given->sizes() == own->sizes() && given->scalar_type() == own->scalar_type())),
          "the per-rank state of '", local.name, "' was saved with other options: it has ",
          describe(*given), ", not ", describe(*own),
          ". Load it with the same options, or save without per_rank");
    }
  }
}

void ModelStates::load_local(const std::vector<LocalExport>& saved, int64_t step) {
  check_local(saved);
  for (const LocalExport& local : saved) {
    const size_t index = *parameters_.find_name(local.name);
    ParameterState& state = *states_[index];
    session_->run_after_steps(parameters_[index].device(), [&] {
      start(state, index);
      for (const auto& [own, given] : members(state, local)) {
        if (own->defined()) own->copy_(*given);
      }
      state.memory_units.fill_(local.grad_scale);
      state.last_step.reset();
    });
  }
  step_ = static_cast<uint64_t>(step);
}

}  // namespace powersgd
