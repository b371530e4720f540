// SPDX-License-Identifier: BSD-3-Clause
//
// The last step of a model, layer by layer: the residual, and the part that was sent.
#include <ATen/ATen.h>

#include <vector>

#include "model/parameter_layout.h"
#include "powersgd/compressor/traffic.h"
#include "powersgd/model/model_states.h"

namespace powersgd {
namespace {

double norm_of(const at::Tensor& tensor) {
  return tensor.norm(2, at::promote_types(tensor.scalar_type(), at::kFloat)).item<double>();
}

// Returns |q|^2 / |M|^2. p_hat has orthonormal columns, so this is the share of M that q captures.
double captured_share(const ParameterState& state) {
  const double m = norm_of(state.memory);
  const double share = m > 0 ? norm_of(state.q_local) / m : 1;
  return share * share;
}

}  // namespace

std::vector<LayerStats> ModelStates::layers() {
  std::vector<LayerStats> all;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& parameter = parameters_[i];
    LayerStats& layer = all.emplace_back();
    layer.name = parameters_.names()[i];
    const ParameterShape shape = parameters_.shape(i);
    layer.shape = matrix_shape(shape);
    layer.rank = sent_numel(shape, options_).rank;
    layer.bytes_before = parameter.numel() * static_cast<int64_t>(parameter.element_size());
    layer.bytes_after =
        content_bytes(plan_bucket({shape}, options_), options_, parameter.scalar_type());
    const ParameterState& state = *states_[i];
    if (!state.allocated()) continue;
    session_->run_after_steps(parameter.device(), [&] { read_last_step(state, layer); });
  }
  return all;
}

void ModelStates::read_last_step(const ParameterState& state, LayerStats& layer) const {
  const double units = grad_scale() / state.memory_units.item<double>();
  layer.residual = norm_of(state.residual()) * units;
  const double delivered = norm_of(state.q_norms);
  if (delivered == 0) return;
  layer.gradient = delivered / session_->size() * units;
  if (state.memory.defined()) layer.captured = captured_share(state);
}

}  // namespace powersgd
