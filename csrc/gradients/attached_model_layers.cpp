// SPDX-License-Identifier: BSD-3-Clause
//
// The last step of an attached model, layer by layer: the residual, and the part that was sent.
#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <string>
#include <vector>

#include "gradients/capture_watch.h"
#include "gradients/parameter_layout.h"
#include "powersgd/attached_model.h"
#include "powersgd/traffic.h"

namespace powersgd {
namespace {

double norm_of(const at::Tensor& tensor) {
  return tensor.norm(2, at::promote_types(tensor.scalar_type(), at::kFloat)).item<double>();
}

// Returns |q|^2 / |M|^2. p_hat has orthonormal columns, so it is the share of M that q has.
double captured_share(const ParameterState& state) {
  const double m = norm_of(state.memory);
  const double share = m > 0 ? norm_of(state.q_local) / m : 1;
  return share * share;
}

std::string low_capture_warning(const std::vector<std::string>& names, const Options& options) {
  constexpr size_t kShown = 3;
  std::string shown;
  for (size_t i = 0; i < std::min(names.size(), kShown); ++i) {
    shown += (i > 0 ? ", '" : "'") + names[i] + "'";
  }
  if (names.size() > kShown) shown += ", ...";
  return c10::str(shown, ": each step of the last ", CaptureWatch::kInterval * CaptureWatch::kLooks,
                  " has sent less than ", CaptureWatch::kLeastCaptured,
                  " of the gradient and the residual, by squared norms, so that gradients arrive "
                  "late. A higher matrix_approximation_rank than ",
                  options.matrix_approximation_rank, " sends more");
}

}  // namespace

std::vector<LayerStats> AttachedModel::layers() {
  std::vector<LayerStats> all;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& parameter = parameters_[i];
    LayerStats& layer = all.emplace_back();
    layer.name = names_[i];
    layer.shape = matrix_shape(memory_layout(parameter));
    layer.rank = is_compressed(parameter) ? effective_rank(layer.shape, options_) : 0;
    layer.bytes_before = parameter.numel() * static_cast<int64_t>(parameter.element_size());
    layer.bytes_after = content_bytes(plan_bucket({memory_layout(parameter)}, options_), options_,
                                      parameter.scalar_type());
    const ParameterState& state = *states_[i];
    if (!state.allocated()) continue;
    session_->run_after_steps(parameter.device(), [&] { read_last_step(state, layer); });
  }
  return all;
}

void AttachedModel::read_last_step(const ParameterState& state, LayerStats& layer) const {
  const double units = grad_scale() / state.grad_scale.item<double>();
  layer.residual = norm_of(state.residual()) * units;
  const double delivered = norm_of(state.q_norms);
  if (delivered == 0) return;
  layer.gradient = delivered / session_->size() * units;
  if (state.memory.defined()) layer.captured = captured_share(state);
}

void AttachedModel::watch_captured() {
  if (!capture_watch_) return;
  const std::vector<ParameterStatePtr> low = capture_watch_->low();
  if (!low.empty()) {
    std::vector<std::string> names;
    for (size_t i = 0; i < states_.size(); ++i) {
      if (std::find(low.begin(), low.end(), states_[i]) != low.end()) names.push_back(names_[i]);
    }
    session_->log(LogLevel::kWarning, low_capture_warning(names, options_));
    capture_watch_ = nullptr;
  } else if (warm() && step_ % CaptureWatch::kInterval == 0) {
    for (const c10::Device device : devices()) {
      std::vector<ParameterStatePtr> states;
      for (size_t i = 0; i < states_.size(); ++i) {
        if (parameters_[i].device() == device) states.push_back(states_[i]);
      }
      capture_watch_->look(*session_, device, states);
    }
  }
}

}  // namespace powersgd
