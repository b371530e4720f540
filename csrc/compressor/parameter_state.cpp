// SPDX-License-Identifier: BSD-3-Clause
#include "powersgd/compressor/parameter_state.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

#include <map>

#include "compressor/bucket_tables.h"
#include "compressor/device_stages.h"
#include "compressor/streams.h"
#include "powersgd/compressor/dtypes.h"

namespace powersgd {
namespace {

using Layouts = std::vector<ParameterState::Layout>;

// Fills q_warm of states by the kernel. The numbers are those of step 0, whenever a parameter joins
// a bucket.
void random_start(const Layouts& layouts, const Options& options) {
  const at::Device device = layouts.front().state->q_warm.device();
  const c10::DeviceGuard guard(device);  // the stages run on the current device
  HostTables tables;
  for (const ParameterState::Layout& layout : layouts) {
    kernels::Matrix& matrix = tables.matrices.emplace_back();
    matrix.rows = matrix.rank = layout.rank;
    matrix.cols = layout.shape.cols;
    matrix.q_warm = layout.state->q_warm.data_ptr();
    matrix.random_id = layout.state->random_id;
  }
  const Stages& stages = require_stages(device.type());
  kernels::Bucket bucket{};
  bucket.seed = static_cast<uint64_t>(options.random_seed);
  tables.tiles = stages.make_tiles(tables.matrices, {});
  const DeviceTables uploaded = upload_tables(bucket, tables, device);
  stages.random_start(bucket);
}

void allocate_one(const ParameterState::Layout& layout, const Options& options, at::Device device) {
  ParameterState& state = *layout.state;
  const auto [rows, cols] = layout.shape;
  const auto factor = at::TensorOptions(device).dtype(at::kFloat);
  if (options.use_error_feedback) {
    state.memory = at::zeros({rows, cols}, factor.dtype(to_scalar_type(options.residual_dtype)));
  }
  state.p_hat = at::zeros({rows, layout.rank}, factor);
  state.q_local = at::zeros({layout.rank, cols}, factor);
  state.q_warm = at::empty({layout.rank, cols}, factor);
}

void allocate_before(ParameterState& state) {
  state.before.clear();
  for (const at::Tensor& tensor : state.step_tensors()) {
    state.before.push_back(at::empty_like(tensor));
  }
}

using Tensors = std::vector<at::Tensor>;

at::Tensor copied(const at::Tensor& tensor) {
  use_on_current_stream(tensor);
  return tensor.clone();
}

// `dropped` is a tensor of one element on the device, or undefined, which stands for 1.
void zero_if(const at::Tensor& dropped, const Tensors& tensors) {
  if (!dropped.defined()) return at::_foreach_zero_(tensors);
  at::_foreach_mul_(tensors, dropped.reshape({}).eq(0).to(at::kFloat));
}

}  // namespace

bool ParameterState::is_on(at::Device device) const {
  return allocated() && q_warm.device() == device;
}

void ParameterState::allocate(const std::vector<Layout>& layouts, const Options& options,
                              at::Device device) {
  if (layouts.empty()) return;
  // The allocator's blocks are larger than a scale, so all scales share one, as all norms do.
  const auto count = static_cast<int64_t>(layouts.size());
  int64_t ranks = 0;
  for (const Layout& layout : layouts) ranks += layout.rank;
  const auto doubles = at::device(device).dtype(at::kDouble);
  const at::Tensor units = at::ones({count}, doubles);
  const at::Tensor q_norms = at::zeros({ranks}, doubles);
  for (int64_t i = 0, k = 0; i < count; ++i) {
    const Layout& layout = layouts[static_cast<size_t>(i)];
    allocate_one(layout, options, device);
    layout.state->memory_units = units.select(0, i);
    layout.state->q_norms = q_norms.narrow(0, k, layout.rank);
    k += layout.rank;
  }
  random_start(layouts, options);
  if (!options.allow_discard) return;
  for (const Layout& layout : layouts) allocate_before(*layout.state);
}

void ParameterState::move_to(at::Device device) {
  for (at::Tensor* tensor : {&memory, &p_hat, &q_local, &q_warm, &memory_units, &q_norms}) {
    if (tensor->defined()) *tensor = tensor->to(device);
  }
  if (!before.empty()) allocate_before(*this);
  last_step.reset();
}

ParameterState ParameterState::copy() const {
  ParameterState made = *this;
  for (at::Tensor* tensor : {&made.memory, &made.p_hat, &made.q_local, &made.q_warm,
                             &made.memory_units, &made.q_norms}) {
    if (tensor->defined()) *tensor = copied(*tensor);
  }
  for (at::Tensor& tensor : made.before) tensor = copied(tensor);
  return made;
}

at::Tensor ParameterState::residual() const {
  if (!memory.defined()) return at::zeros({p_hat.size(0), q_local.size(1)}, p_hat.options());
  // torch.set_float32_matmul_precision may round products of float32 to TF32 or bfloat16.
  const at::Tensor delivered = at::matmul(p_hat.to(at::kDouble), q_local.to(at::kDouble));
  return memory.to(at::kFloat).sub(delivered.to(at::kFloat));
}

void ParameterState::set_residual(const at::Tensor& value) {
  if (!memory.defined()) return;
  memory.copy_(value);
  mark_undelivered();
}

void ParameterState::drop_residual() {
  if (memory.defined()) memory.zero_();
  mark_undelivered();
}

void ParameterState::mark_undelivered() { q_local.zero_(); }

void ParameterState::mark_undelivered(const std::vector<ParameterStatePtr>& states,
                                      const at::Tensor& dropped) {
  if (dropped.defined() && dropped.is_cpu() && dropped.item<double>() == 0) return;
  Tensors sent;
  for (const ParameterStatePtr& state : states) {
    if (state->allocated()) sent.push_back(state->q_local);
  }
  if (!sent.empty()) zero_if(dropped, sent);
}

std::vector<at::Tensor> ParameterState::step_tensors() const {
  Tensors tensors = {p_hat, q_local, q_warm, memory_units};
  if (memory.defined()) tensors.push_back(memory);
  return tensors;
}

void ParameterState::keep_before_step(const std::vector<ParameterStatePtr>& states) {
  std::map<at::ScalarType, std::pair<Tensors, Tensors>> copies;  // to and from, in one launch each
  for (const ParameterStatePtr& state : states) {
    const Tensors tensors = state->step_tensors();
    for (size_t i = 0; i < state->before.size(); ++i) {
      auto& [to, from] = copies[tensors[i].scalar_type()];
      to.push_back(state->before[i]);
      from.push_back(tensors[i]);
    }
  }
  for (auto& [type, copy] : copies) at::_foreach_copy_(copy.first, copy.second);
}

void ParameterState::discard_step() {
  at::_foreach_copy_(step_tensors(), before);
  q_norms.zero_();
}

void ParameterState::take_back(const at::Tensor& gradient) {
  mark_undelivered();
  if (!memory.defined()) return;
  const at::Tensor zero = at::zeros({}, gradient.options());
  memory.sub_(at::where(at::isfinite(gradient), gradient, zero).view_as(memory));
}

}  // namespace powersgd
