// SPDX-License-Identifier: BSD-3-Clause
#include "powersgd/compressor.h"

#include <ATen/ATen.h>

#include <utility>

#include "compressor/stages.h"
#include "compressor/tables.h"
#include "compressor/wire_payload.h"

namespace powersgd {
namespace {

std::vector<kernels::RawSegment> raw_table(const BucketPlan& plan) {
  std::vector<kernels::RawSegment> table;
  for (const PlannedRaw& raw : plan.raw) {
    table.push_back({raw.gradient_offset, raw.numel, raw.p_offset});
  }
  return table;
}

}  // namespace

bool has_kernels(c10::DeviceType device) { return find_stages(device) != nullptr; }

BucketCompressor::BucketCompressor(BucketPlan plan, std::vector<ParameterStatePtr> states,
                                   const Options& options, at::ScalarType gradient_type,
                                   at::Device device, std::shared_ptr<SkipCounter> skips)
    : plan_(std::move(plan)),
      states_(std::move(states)),
      options_(options),
      gradient_type_(gradient_type),
      device_(device),
      stages_(require_stages(device.type())),
      skips_(std::move(skips)) {
  TORCH_INTERNAL_ASSERT(states_.size() == plan_.matrices.size());
  const bool is_double = gradient_type == at::kDouble;
  bucket_.gradient_dtype = to_dtype(gradient_type);
  bucket_.factor_dtype = is_double ? DType::kFloat64 : DType::kFloat32;
  bucket_.residual_dtype = is_double ? DType::kFloat64 : options.residual_dtype;
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
  if (!p_payload_.defined()) prepare();
  if (!options_.warm_start) {
    kernels::Bucket start = bucket_;
    if (step.same_start) start.step = 0;
    stages_.random_start(start);
  }
  bucket_.residual_scale = residual_scale(step.grad_scale);
  bucket_.output_scale = step.output_scale;
  bucket_.gradient = gradient.data_ptr();
  stages_.project(bucket_);
  gradient_ = gradient;
  if (!p_wire_->rounds()) return p_payload_;
  const at::Tensor exact = raw_.add_(raw_residual_).clone();
  at::Tensor& packed = p_wire_->pack();
  keep_rounding_of_raw(exact);
  return packed;
}

void BucketCompressor::orthogonalize() {
  p_wire_->unpack();
  stages_.orthogonalize(bucket_);
}

at::Tensor& BucketCompressor::back_project() {
  stages_.back_project(bucket_);
  if (!q_wire_->rounds()) return q_payload_;
  at::Tensor& packed = q_wire_->pack();
  // What was rounded off was not sent: it stays in the residual, which is made of q_local.
  at::_foreach_copy_(q_local_, q_sent_);
  return packed;
}

void BucketCompressor::reconstruct() {
  q_wire_->unpack();
  stages_.reconstruct(bucket_);
  gradient_ = at::Tensor();
}

void BucketCompressor::rollback() {
  if (!gradient_.defined()) return;
  const at::Tensor flat = gradient_.view({-1});
  for (size_t i = 0; i < states_.size(); ++i) {
    ParameterState& state = *states_[i];
    state.q_local.zero_();
    if (!state.memory.defined()) continue;
    const at::Tensor g = flat.narrow(0, plan_.matrices[i].gradient_offset, state.memory.numel());
    const at::Tensor finite = at::where(at::isfinite(g), g, at::zeros({}, g.options()));
    state.memory.sub_(finite.view_as(state.memory));
  }
  gradient_ = at::Tensor();
}

std::vector<ParameterStatePtr> BucketCompressor::states_in_use() const {
  std::vector<ParameterStatePtr> all = states_;
  for (const ParameterStatePtr& state : states_) {
    if (state->shares_q_of) all.push_back(state->shares_q_of);
  }
  return all;
}

// An element that has overflowed is dropped with the step.
void BucketCompressor::keep_rounding_of_raw(const at::Tensor& exact) {
  at::nan_to_num_out(raw_residual_, exact.sub(raw_), 0, 0, 0);
}

int64_t BucketCompressor::payload_bytes() const {
  const DType wire = options_.wire_dtype.value_or(bucket_.factor_dtype);
  return (plan_.p_numel + plan_.q_numel) * size_of(wire);
}

int64_t BucketCompressor::gradient_bytes() const {
  return plan_.gradient_numel * size_of(bucket_.gradient_dtype);
}

// Allocates the states that no earlier bucket has, the payloads and the tables.
void BucketCompressor::prepare() {
  for (size_t i = 0; i < states_.size(); ++i) {
    const PlannedMatrix& matrix = plan_.matrices[i];
    if (states_[i]->allocated()) continue;
    allocate(*states_[i], matrix.shape, matrix.rank, options_, gradient_type_, device_);
  }
  const auto bytes = at::device(device_);
  const auto factor = bytes.dtype(to_scalar_type(bucket_.factor_dtype));
  verdict_ = at::zeros({2}, bytes.dtype(at::kInt));
  static_assert(sizeof(kernels::Verdict) == 2 * sizeof(int32_t));
  at::Tensor p_payload = at::zeros({plan_.p_numel}, factor);
  q_payload_ = at::zeros({plan_.q_numel}, factor);
  const at::ScalarType wire =
      options_.wire_dtype ? to_scalar_type(*options_.wire_dtype) : p_payload.scalar_type();
  const auto matrices = static_cast<int64_t>(plan_.matrices.size());
  const int64_t counts_begin = plan_.p_numel - 1 - matrices;
  p_wire_ = std::make_unique<WirePayload>(p_payload, wire, counts_begin);
  q_wire_ = std::make_unique<WirePayload>(q_payload_, wire, plan_.q_numel);
  if (p_wire_->rounds()) {
    const int64_t raw_begin = plan_.raw.empty() ? counts_begin : plan_.raw.front().p_offset;
    raw_ = p_payload.narrow(0, raw_begin, counts_begin - raw_begin);
    raw_residual_ = at::zeros_like(raw_);
    for (size_t i = 0; i < states_.size(); ++i) {
      const at::Tensor& q = states_[i]->q_local;
      q_local_.push_back(q);
      q_sent_.push_back(
          q_payload_.narrow(0, plan_.matrices[i].q_offset, q.numel()).view(q.sizes()));
    }
  }
  tables_ = set_tables(bucket_, stages_, matrix_table(), raw_table(plan_), device_);
  bucket_.p_payload = p_payload.data_ptr();
  bucket_.q_payload = q_payload_.data_ptr();
  bucket_.verdict = static_cast<kernels::Verdict*>(verdict_.data_ptr());
  bucket_.skipped_steps = skips_ ? skips_->on(device_) : nullptr;
  p_payload_ = std::move(p_payload);  // last: it says that all the rest is there
}

// The factor that takes the old residuals to the units of this step's gradient. All parameters of a
// bucket have gone through the same steps, so that one factor serves; one that has not (it was
// loaded, or it joined the bucket) is brought to the others' units first.
double BucketCompressor::residual_scale(double grad_scale) {
  const double common = states_.front()->grad_scale;
  for (const ParameterStatePtr& state : states_) {
    if (state->grad_scale != common && state->memory.defined()) {
      state->memory.mul_(common / state->grad_scale);
      state->q_local.mul_(common / state->grad_scale);
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
    table.push_back(matrix);
  }
  return table;
}

}  // namespace powersgd
