// SPDX-License-Identifier: BSD-3-Clause
#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

#include <map>

#include "compressor/bucket_tables.h"
#include "compressor/stages.h"
#include "powersgd/compressor.h"

namespace powersgd {
namespace {

// Fills a factor ([rank, n]) by the kernel, so that a start does not depend on when a parameter
// joined a bucket.
void start(const at::Tensor& factor, uint64_t stream, const Options& options) {
  const c10::DeviceGuard guard(factor.device());  // the stages run on the current device
  kernels::Matrix matrix{};
  matrix.rows = matrix.rank = factor.size(0);
  matrix.cols = factor.size(1);
  matrix.q_warm = factor.data_ptr();
  matrix.stream = stream;
  kernels::Bucket bucket{};
  bucket.factor_dtype = to_dtype(factor.scalar_type());
  bucket.seed = static_cast<uint64_t>(options.random_seed);
  const Stages& stages = require_stages(factor.device().type());
  const std::vector<at::Tensor> owned = set_tables(bucket, stages, {matrix}, {}, factor.device());
  stages.random_start(bucket);
}

// Makes the columns of a factor ([n, rank], in any layout) orthonormal, by the stage.
void orthonormalize(const at::Tensor& factor, uint64_t stream, const Options& options) {
  const c10::DeviceGuard guard(factor.device());
  at::Tensor payload = at::zeros({factor.numel() + 1}, factor.options());
  payload.narrow(0, 0, factor.numel()).view(factor.sizes()).copy_(factor);
  at::Tensor p_hat = at::zeros(factor.sizes(), factor.options());
  at::Tensor verdict = at::zeros({2}, factor.options().dtype(at::kInt));
  kernels::Matrix matrix{};
  matrix.rows = factor.size(0);
  matrix.cols = matrix.rank = factor.size(1);
  matrix.p_hat = p_hat.data_ptr();
  matrix.stream = stream;
  kernels::Bucket bucket{};
  bucket.factor_dtype = to_dtype(factor.scalar_type());
  bucket.epsilon = options.orthogonalization_epsilon;
  bucket.seed = static_cast<uint64_t>(options.random_seed);
  bucket.p_payload = payload.data_ptr();
  bucket.p_numel = payload.numel();
  bucket.verdict = static_cast<kernels::Verdict*>(verdict.data_ptr());
  const Stages& stages = require_stages(factor.device().type());
  const std::vector<at::Tensor> owned = set_tables(bucket, stages, {matrix}, {}, factor.device());
  stages.orthogonalize(bucket);
  factor.copy_(p_hat);
}

}  // namespace

DType to_dtype(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return DType::kFloat32;
    case at::kDouble:
      return DType::kFloat64;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kHalf:
      return DType::kFloat16;
    default:
      TORCH_CHECK(false, "powersgd compresses float32, float64, bfloat16 and float16, got ", type);
  }
}

at::ScalarType to_scalar_type(DType type) {
  switch (type) {
    case DType::kFloat64:
      return at::kDouble;
    case DType::kBFloat16:
      return at::kBFloat16;
    case DType::kFloat16:
      return at::kHalf;
    default:
      return at::kFloat;
  }
}

at::ScalarType factor_type(at::ScalarType gradient_type) {
  return gradient_type == at::kDouble ? at::kDouble : at::kFloat;
}

at::ScalarType residual_type(at::ScalarType gradient_type, const Options& options) {
  return gradient_type == at::kDouble ? at::kDouble : to_scalar_type(options.residual_dtype);
}

bool is_compressible(at::ScalarType type) {
  return type == at::kFloat || type == at::kDouble || type == at::kBFloat16 || type == at::kHalf;
}

void allocate(ParameterState& state, const MatrixShape& shape, int64_t rank, const Options& options,
              at::ScalarType gradient_type, at::Device device) {
  const auto factor = at::TensorOptions(device).dtype(factor_type(gradient_type));
  state.shape = shape;
  state.rank = rank;
  if (options.use_error_feedback) {
    const auto memory = at::TensorOptions(device).dtype(residual_type(gradient_type, options));
    state.memory = at::zeros({shape.rows, shape.cols}, memory);
  }
  state.p_hat = at::zeros({shape.rows, rank}, factor);
  state.q_local = at::zeros({rank, shape.cols}, factor);
  if (options.alternating) state.p_local = at::zeros_like(state.p_hat);
  state.q_warm = at::zeros({rank, shape.cols}, factor);
  start(state.q_warm, state.stream, options);
  if (!options.alternating) return;
  orthonormalize_q(state, options);
  // Other numbers than those of Q.
  const uint64_t stream = ~state.stream;
  at::Tensor rows = at::zeros({rank, shape.rows}, factor);
  start(rows, stream, options);
  state.p_hat.copy_(rows.t());
  orthonormalize(state.p_hat, stream, options);
}

void orthonormalize_q(ParameterState& state, const Options& options) {
  orthonormalize(state.q_warm.t(), state.stream, options);
}

at::Tensor& delivered_factor(ParameterState& state) {
  return state.sent_p ? state.p_local : state.q_local;
}

kernels::StepCounts* StepCounter::on(at::Device device) {
  const std::lock_guard<std::mutex> lock(mutex_);
  static_assert(sizeof(kernels::StepCounts) == 4 * sizeof(int64_t));
  for (at::Tensor& count : counts_) {
    if (count.device() == device) return static_cast<kernels::StepCounts*>(count.data_ptr());
  }
  counts_.push_back(at::zeros({4}, at::device(device).dtype(at::kLong)));
  return static_cast<kernels::StepCounts*>(counts_.back().data_ptr());
}

StepCounter::Totals StepCounter::totals() {
  const std::lock_guard<std::mutex> lock(mutex_);
  Totals totals;
  for (const at::Tensor& device_counts : counts_) {
    const at::Tensor counts = device_counts.cpu();
    const auto* steps = static_cast<const kernels::StepCounts*>(counts.data_ptr());
    totals.skipped += static_cast<int64_t>(steps->skipped.count);
    totals.saturated += static_cast<int64_t>(steps->saturated.count);
  }
  return totals;
}

std::vector<at::Device> StepCounter::devices() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<at::Device> devices;
  for (const at::Tensor& count : counts_) devices.push_back(count.device());
  return devices;
}

at::Tensor residual(const ParameterState& state) {
  const at::Tensor pending = state.sent_p ? at::matmul(state.p_local, state.q_warm)
                                          : at::matmul(state.p_hat, state.q_local);
  if (!state.memory.defined()) return at::zeros_like(pending);
  return state.memory.to(pending.scalar_type()).sub(pending);
}

void set_residual(ParameterState& state, const at::Tensor& value) {
  if (!state.memory.defined()) return;
  state.memory.copy_(value);
  delivered_factor(state).zero_();
}

void keep_delivered(const std::vector<ParameterStatePtr>& states, const at::Tensor& dropped) {
  if (dropped.defined() && dropped.is_cpu() && dropped.item<double>() == 0) return;
  std::map<at::ScalarType, std::vector<at::Tensor>> delivered;
  for (const ParameterStatePtr& state : states) {
    if (!state->allocated()) continue;
    const at::Tensor& factor = delivered_factor(*state);
    delivered[factor.scalar_type()].push_back(factor);
  }
  for (auto& [type, tensors] : delivered) {
    if (dropped.defined()) {
      at::_foreach_mul_(tensors, dropped.reshape({}).eq(0).to(type));
    } else {
      at::_foreach_zero_(tensors);
    }
  }
}

}  // namespace powersgd
