// SPDX-License-Identifier: BSD-3-Clause
#include "compressor/torch_products.h"

#include <ATen/ATen.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <limits>
#include <utility>

namespace powersgd {
namespace {

// Neither of these settings of the caller may round operands: TF32 and autocast.
struct ExactProducts {
  at::NoTF32Guard no_tf32;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
};

// sum += scale * a b, in the dtype of a and b
void add_product(const at::Tensor& sum, const at::Tensor& a, const at::Tensor& b, double scale) {
  if (sum.scalar_type() == a.scalar_type()) {
    sum.addmm_(a, b, 1, scale);
  } else {
    sum.add_(at::mm(a, b), scale);
  }
}

// One pass of Cholesky-QR on x^T x + ridge I. The ridge makes the factor exist for dependent
// columns too. What they add to the columns before them is below it, so the pass leaves at most
// half of their squares. These columns become 0, and hardly change those after them.
at::Tensor cholesky_qr(const at::Tensor& x, const at::Tensor& ridge) {
  const at::Tensor gram = at::mm(x.t(), x);
  gram.diagonal().add_(ridge);
  const auto [factor, failed] = at::linalg_cholesky_ex(gram);
  const at::Tensor y = at::linalg_solve_triangular(factor.t(), x, /*upper=*/true, /*left=*/false);
  const at::Tensor live = y.square().sum(0).gt(0.5).logical_and(failed.eq(0));
  return at::where(live, y, 0);
}

}  // namespace

// Fukaya, Kannan, Nakatsukasa, Yamamoto, Yanagisawa, "Shifted Cholesky QR for computing the QR
// factorization of ill-conditioned matrices" (2020). The first ridge is a share of the trace, and
// the others one of a unit column's square.
at::Tensor orthonormal(const at::Tensor& p, double epsilon) {
  const ExactProducts exact;
  at::Tensor x = p.to(at::kDouble);
  const at::Tensor trace = x.square().sum();
  constexpr double kDeadPivot = 1.0 / (int64_t{1} << 46);  // as in the kernels
  constexpr double kSmallest = std::numeric_limits<double>::min();
  x = cholesky_qr(x, trace.mul(std::max(kDeadPivot, epsilon)).clamp_min(kSmallest));
  const at::Tensor ridge = at::full({}, kDeadPivot, x.options());
  return cholesky_qr(cholesky_qr(x, ridge), ridge);
}

TorchProducts::TorchProducts(const BucketPlan& plan, const std::vector<ParameterStatePtr>& states,
                             const Payloads& payloads, at::Tensor skipped, double epsilon)
    : all_p_(payloads.p.narrow(0, 0, plan.raw_offset())),
      non_finite_count_(payloads.p.select(0, plan.p_numel - 1)),
      skipped_(std::move(skipped)),
      epsilon_(epsilon) {
  for (size_t i = 0; i < states.size(); ++i) {
    const PlannedMatrix& matrix = plan.matrices[i];
    const auto [rows, cols] = matrix.shape;
    const auto part = [](const at::Tensor& payload, int64_t offset, int64_t size, int64_t other) {
      return payload.narrow(0, offset, size * other).view({size, other});
    };
    matrices_.push_back({matrix, states[i], part(payloads.p, matrix.p_offset, rows, matrix.rank),
                         part(payloads.q, matrix.q_offset, matrix.rank, cols), at::Tensor()});
    if (matrix.use_offset >= 0) matrices_.back().use = payloads.p.select(0, matrix.use_offset);
  }
}

at::Tensor TorchProducts::Matrix::gradient_of(const at::Tensor& bucket) const {
  const auto [rows, cols] = plan.shape;
  return bucket.view({-1}).narrow(0, plan.gradient_offset, rows * cols).view({rows, cols});
}

at::Tensor TorchProducts::Matrix::m(const at::Tensor& bucket) const {
  return (state->memory.defined() ? state->memory : gradient_of(bucket)).to(q.scalar_type());
}

at::Tensor TorchProducts::Matrix::sends_nothing(const at::Tensor& skipped) const {
  return use.defined() ? skipped.ne(0).logical_or(use.eq(0)) : skipped.ne(0);
}

void TorchProducts::subtract_sent() const {
  const ExactProducts exact;
  for (const Matrix& matrix : matrices_) {
    ParameterState& state = *matrix.state;
    if (!state.memory.defined()) continue;
    add_product(state.memory, state.p_hat, state.q_local, -1);
    state.mark_undelivered();
  }
}

void TorchProducts::project(const at::Tensor& gradient) const {
  const ExactProducts exact;
  for (const Matrix& matrix : matrices_) {
    at::Tensor p = matrix.p;
    at::mm_out(p, matrix.m(gradient), matrix.state->q_warm.t());
  }
}

void TorchProducts::orthogonalize() const {
  skipped_.copy_(at::isfinite(all_p_).all().logical_not().logical_or(non_finite_count_.ne(0)));
  for (const Matrix& matrix : matrices_) {
    const at::Tensor& p_hat = matrix.state->p_hat;
    const at::Tensor basis = orthonormal(matrix.p, epsilon_).to(p_hat.scalar_type());
    p_hat.copy_(at::where(matrix.sends_nothing(skipped_), p_hat, basis));
  }
}

void TorchProducts::back_project(const at::Tensor& gradient) const {
  const ExactProducts exact;
  for (const Matrix& matrix : matrices_) {
    at::Tensor q = matrix.q;
    at::mm_out(q, matrix.state->p_hat.t(), matrix.m(gradient));
    q.masked_fill_(matrix.sends_nothing(skipped_), 0);
    matrix.state->q_local.copy_(q);
  }
}

void TorchProducts::reconstruct(const at::Tensor& gradient, double output_scale) const {
  const ExactProducts exact;
  for (const Matrix& matrix : matrices_) {
    at::Tensor p_hat = matrix.state->p_hat;
    if (matrix.use.defined()) p_hat = p_hat.mul(matrix.use.ne(0));
    add_product(matrix.gradient_of(gradient), p_hat, matrix.q, output_scale);
  }
}

}  // namespace powersgd
