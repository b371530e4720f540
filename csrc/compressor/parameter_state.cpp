// SPDX-License-Identifier: BSD-3-Clause
#include "powersgd/parameter_state.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

#include <map>

#include "compressor/bucket_tables.h"
#include "compressor/stages.h"
#include "powersgd/dtypes.h"

namespace powersgd {
namespace {

// Fills a factor ([rank, n]) by the kernel. The numbers are those of step 0, whenever a parameter
// joins a bucket.
void random_start(const at::Tensor& factor, uint64_t random_id, const Options& options) {
  const c10::DeviceGuard guard(factor.device());  // the stages run on the current device
  kernels::Matrix matrix{};
  matrix.rows = matrix.rank = factor.size(0);
  matrix.cols = factor.size(1);
  matrix.q_warm = factor.data_ptr();
  matrix.random_id = random_id;
  kernels::Bucket bucket{};
  bucket.factor_dtype = bucket.wire_dtype = to_dtype(factor.scalar_type());
  bucket.seed = static_cast<uint64_t>(options.random_seed);
  const BucketTables tables(bucket, {matrix}, {}, factor.device());
  require_stages(factor.device().type()).random_start(tables.bucket());
}

}  // namespace

void ParameterState::allocate(const MatrixShape& shape, int64_t rank, const Options& options,
                              at::ScalarType gradient_type, at::Device device) {
  const auto factor = at::TensorOptions(device).dtype(factor_type(gradient_type));
  if (options.use_error_feedback) {
    memory =
        at::zeros({shape.rows, shape.cols}, factor.dtype(residual_type(gradient_type, options)));
  }
  p_hat = at::zeros({shape.rows, rank}, factor);
  q_local = at::zeros({rank, shape.cols}, factor);
  q_warm = at::zeros({rank, shape.cols}, factor);
  random_start(q_warm, random_id, options);
}

at::Tensor ParameterState::residual() const {
  const at::Tensor delivered = at::matmul(p_hat, q_local);
  if (!memory.defined()) return at::zeros_like(delivered);
  return memory.to(delivered.scalar_type()).sub(delivered);
}

void ParameterState::set_residual(const at::Tensor& value) {
  if (!memory.defined()) return;
  memory.copy_(value);
  mark_undelivered();
}

void ParameterState::mark_undelivered() { q_local.zero_(); }

void ParameterState::mark_undelivered(const std::vector<ParameterStatePtr>& states,
                                      const at::Tensor& dropped) {
  if (dropped.defined() && dropped.is_cpu() && dropped.item<double>() == 0) return;
  std::map<at::ScalarType, std::vector<at::Tensor>> factors;
  for (const ParameterStatePtr& state : states) {
    if (!state->allocated()) continue;
    factors[state->q_local.scalar_type()].push_back(state->q_local);
  }
  for (auto& [type, tensors] : factors) {
    if (dropped.defined()) {
      at::_foreach_mul_(tensors, dropped.reshape({}).eq(0).to(type));
    } else {
      at::_foreach_zero_(tensors);
    }
  }
}

void ParameterState::take_back(const at::Tensor& gradient) {
  mark_undelivered();
  if (!memory.defined()) return;
  const at::Tensor zero = at::zeros({}, gradient.options());
  memory.sub_(at::where(at::isfinite(gradient), gradient, zero).view_as(memory));
}

void ParameterState::rescale(double new_grad_scale) {
  if (grad_scale != new_grad_scale && memory.defined()) {
    memory.mul_(new_grad_scale / grad_scale);
    q_local.mul_(new_grad_scale / grad_scale);
  }
  grad_scale = new_grad_scale;
}

}  // namespace powersgd
