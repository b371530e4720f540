// SPDX-License-Identifier: BSD-3-Clause
#include "model/capture_watch.h"

#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <iterator>
#include <utility>

namespace powersgd {
namespace {

at::Tensor norms_of(const std::vector<at::Tensor>& tensors) {
  const bool wide = std::any_of(tensors.begin(), tensors.end(), [](const at::Tensor& tensor) {
    return tensor.scalar_type() == at::kDouble;
  });
  // In the tensors' own dtype, because another one would copy them.
  const auto norms = at::_foreach_norm(tensors, 2, wide ? at::kDouble : at::kFloat);
  return at::stack(norms).to(at::kDouble);
}

at::Tensor norms_of_last_step(const std::vector<ParameterStatePtr>& states) {
  std::vector<at::Tensor> q, m, delivered;
  for (const ParameterStatePtr& state : states) {
    q.push_back(state->q_local);
    m.push_back(state->memory);
    delivered.push_back(state->q_norms);
  }
  const at::Tensor norms = at::stack({norms_of(q), norms_of(m), norms_of(delivered)});
  if (norms.is_cpu()) return norms;
  const auto on_host = at::TensorOptions(at::kDouble).pinned_memory(norms.is_cuda());
  return at::empty(norms.sizes(), on_host).copy_(norms, /*non_blocking=*/true);
}

}  // namespace

void CaptureWatch::sample(Session& session, c10::Device device,
                          const std::vector<ParameterStatePtr>& states) {
  Sample sample;
  std::copy_if(states.begin(), states.end(), std::back_inserter(sample.states),
               [](const auto& state) { return state->allocated() && state->memory.defined(); });
  if (sample.states.empty()) return;
  sample.norms = std::make_shared<at::Tensor>();
  sample.work = session.start_after_steps(device, [states = sample.states, norms = sample.norms] {
    *norms = norms_of_last_step(states);
  });
  samples_.push_back(std::move(sample));
}

std::vector<ParameterStatePtr> CaptureWatch::low() {
  std::vector<ParameterStatePtr> found;
  while (!samples_.empty() && samples_.front().work->isCompleted()) {
    const Sample sample = std::move(samples_.front());
    samples_.pop_front();
    if (sample.work->exception()) continue;
    count(sample);
    std::copy_if(sample.states.begin(), sample.states.end(), std::back_inserter(found),
                 [this](const auto& state) { return low_in_a_row_[state.get()] == kSamples; });
  }
  return found;
}

void CaptureWatch::count(const Sample& sample) {
  const auto norms = sample.norms->accessor<double, 2>();
  for (size_t i = 0; i < sample.states.size(); ++i) {
    const auto column = static_cast<int64_t>(i);
    const double q = norms[0][column], m = norms[1][column];
    const bool delivered = norms[2][column] > 0;  // an unused or skipped parameter says nothing
    int& low = low_in_a_row_[sample.states[i].get()];
    if (delivered) low = q * q < kLeastCaptured * m * m ? low + 1 : 0;
  }
}

std::string low_capture_warning(const std::vector<std::string>& names) {
  constexpr size_t kShown = 3;
  std::string shown;
  for (size_t i = 0; i < std::min(names.size(), kShown); ++i) {
    shown += (i > 0 ? ", '" : "'") + names[i] + "'";
  }
  if (names.size() > kShown) shown += ", ...";
  return c10::str(shown, ": each of the last ", CaptureWatch::kInterval * CaptureWatch::kSamples,
                  " steps sent less than ", CaptureWatch::kLeastCaptured,
                  " of the gradient plus residual (squared norms), so gradients arrive late. A "
                  "higher matrix_approximation_rank sends more, or higher matrix_ranks of these");
}

}  // namespace powersgd
