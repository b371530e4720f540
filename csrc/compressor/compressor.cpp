// SPDX-License-Identifier: BSD-3-Clause
#include "powersgd/compressor.h"

#include <ATen/ATen.h>

#include <utility>

#include "compressor/alternating_compressor.h"
#include "compressor/plain_compressor.h"
#include "compressor/stages.h"
#include "compressor/wire_payload.h"

namespace powersgd {

bool has_kernels(c10::DeviceType device) { return find_stages(device) != nullptr; }

std::unique_ptr<BucketCompressor> make_compressor(BucketPlan plan,
                                                  std::vector<ParameterStatePtr> states,
                                                  const Options& options,
                                                  at::ScalarType gradient_type, at::Device device,
                                                  std::shared_ptr<StepCounter> step_counter) {
  if (options.alternating) {
    return std::make_unique<AlternatingCompressor>(std::move(plan), std::move(states), options,
                                                   gradient_type, device, std::move(step_counter));
  }
  return std::make_unique<PlainCompressor>(std::move(plan), std::move(states), options,
                                           gradient_type, device, std::move(step_counter));
}

BucketCompressor::BucketCompressor(BucketPlan plan, std::vector<ParameterStatePtr> states,
                                   const Options& options, at::ScalarType gradient_type,
                                   at::Device device, std::shared_ptr<StepCounter> step_counter)
    : plan_(std::move(plan)),
      states_(std::move(states)),
      options_(options),
      gradient_type_(gradient_type),
      device_(device),
      stages_(require_stages(device.type())),
      step_counter_(std::move(step_counter)) {
  TORCH_INTERNAL_ASSERT(states_.size() == plan_.matrices.size());
  bucket_.gradient_dtype = to_dtype(gradient_type);
  bucket_.factor_dtype = to_dtype(factor_type(gradient_type));
  bucket_.residual_dtype = to_dtype(residual_type(gradient_type, options));
  bucket_.epsilon = options.orthogonalization_epsilon;
  bucket_.seed = static_cast<uint64_t>(options.random_seed);
  bucket_.p_numel = plan_.p_numel;
  bucket_.q_numel = plan_.q_numel;
}

BucketCompressor::~BucketCompressor() = default;

at::Tensor& BucketCompressor::project(const at::Tensor& gradient, const StepInfo& step) {
  TORCH_INTERNAL_ASSERT(gradient.is_contiguous() && gradient.numel() == plan_.gradient_numel &&
                        gradient.scalar_type() == gradient_type_);
  bucket_.step = step.step;
  for (const ParameterStatePtr& state : states_) state->last_step = static_cast<int64_t>(step.step);
  if (!prepared_) begin();
  const double scale = residual_scale(step.grad_scale);
  bucket_.residual_scale = step.drop_residual ? 0 : scale;
  bucket_.output_scale = step.output_scale;
  bucket_.gradient = gradient.data_ptr();
  return project_gradient(gradient, step);
}

void BucketCompressor::begin_step(const at::Tensor& gradient) { gradient_ = gradient; }

at::Tensor& BucketCompressor::back_project() {
  TORCH_INTERNAL_ASSERT(false, "this step sends one factor");
}

void BucketCompressor::reconstruct() {
  reconstruct_gradient();
  gradient_ = at::Tensor();
}

void BucketCompressor::rollback() {
  if (!gradient_.defined()) return;
  const at::Tensor flat = gradient_.view({-1});
  for (size_t i = 0; i < states_.size(); ++i) {
    ParameterState& state = *states_[i];
    delivered_factor(state).zero_();
    if (!state.memory.defined()) continue;
    const at::Tensor g = flat.narrow(0, plan_.matrices[i].gradient_offset, state.memory.numel());
    const at::Tensor finite = at::where(at::isfinite(g), g, at::zeros({}, g.options()));
    state.memory.sub_(finite.view_as(state.memory));
  }
  gradient_ = at::Tensor();
}

int64_t BucketCompressor::gradient_bytes() const {
  return plan_.gradient_numel * size_of(bucket_.gradient_dtype);
}

// Allocates the states that no earlier bucket has, and what every compressor has.
void BucketCompressor::begin() {
  for (size_t i = 0; i < states_.size(); ++i) {
    const PlannedMatrix& matrix = plan_.matrices[i];
    if (states_[i]->allocated()) continue;
    allocate(*states_[i], matrix.shape, matrix.rank, options_, gradient_type_, device_);
  }
  static_assert(sizeof(kernels::Verdict) == 2 * sizeof(int32_t));
  verdict_ = at::zeros({2}, at::device(device_).dtype(at::kInt));
  bucket_.verdict = static_cast<kernels::Verdict*>(verdict_.data_ptr());
  bucket_.step_counts = step_counter_ ? step_counter_->on(device_) : nullptr;
  prepare();
  prepared_ = true;
}

at::TensorOptions BucketCompressor::factor_options() const {
  return at::device(device_).dtype(factor_type(gradient_type_));
}

at::ScalarType BucketCompressor::wire_type() const {
  return options_.wire_dtype ? to_scalar_type(*options_.wire_dtype) : factor_type(gradient_type_);
}

void BucketCompressor::keep_rounding_of(const at::Tensor& raw) {
  raw_ = raw;
  raw_residual_ = at::zeros_like(raw);
}

at::Tensor& BucketCompressor::pack(WirePayload& payload) {
  if (!payload.rounds()) return payload.pack();
  const at::Tensor exact = raw_.add_(raw_residual_).clone();
  at::Tensor& packed = payload.pack();
  // An element that has overflowed is dropped with the step.
  at::nan_to_num_out(raw_residual_, exact.sub(raw_), 0, 0, 0);
  return packed;
}

// The factor that takes the old residuals to the units of this step's gradient. All parameters of a
// bucket have gone through the same steps, so that one factor serves; one that has not (it was
// loaded, or it joined the bucket) is brought to the others' units first.
double BucketCompressor::residual_scale(double grad_scale) {
  const double common = states_.front()->grad_scale;
  for (const ParameterStatePtr& state : states_) {
    if (state->grad_scale != common && state->memory.defined()) {
      state->memory.mul_(common / state->grad_scale);
      delivered_factor(*state).mul_(common / state->grad_scale);
    }
    state->grad_scale = grad_scale;
  }
  return grad_scale / common;
}

std::vector<kernels::Matrix> BucketCompressor::matrix_table() const {
  std::vector<kernels::Matrix> table;
  for (size_t i = 0; i < states_.size(); ++i) {
    const PlannedMatrix& planned = plan_.matrices[i];
    const ParameterState& state = *states_[i];
    kernels::Matrix matrix{};
    matrix.rows = planned.shape.rows;
    matrix.cols = planned.shape.cols;
    matrix.rank = planned.rank;
    matrix.gradient_offset = planned.gradient_offset;
    matrix.p_offset = planned.p_offset;
    matrix.q_offset = planned.q_offset;
    matrix.memory = state.memory.defined() ? state.memory.data_ptr() : nullptr;
    matrix.p_hat = state.p_hat.data_ptr();
    matrix.q_local = state.q_local.data_ptr();
    matrix.q_warm = state.q_warm.data_ptr();
    matrix.stream = state.stream;
    matrix.active_offset = planned.active_offset;
    matrix.p_local = state.p_local.defined() ? state.p_local.data_ptr() : nullptr;
    table.push_back(matrix);
  }
  return table;
}

std::vector<kernels::RawSegment> BucketCompressor::raw_table() const {
  std::vector<kernels::RawSegment> table;
  for (const PlannedRaw& raw : plan_.raw) {
    table.push_back({raw.gradient_offset, raw.numel, raw.p_offset});
  }
  return table;
}

}  // namespace powersgd
