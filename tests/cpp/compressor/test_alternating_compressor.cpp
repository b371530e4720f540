// SPDX-License-Identifier: BSD-3-Clause
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <limits>

#include "powersgd/compressor.h"
#include "support/one_rank.h"

namespace powersgd {
namespace {

Options make_options(int64_t rank = 3) {
  Options options;
  options.matrix_approximation_rank = rank;
  options.alternating = true;
  return options;
}

using test::relative;

class Bucket : public test::OneRank {
 public:
  using test::OneRank::OneRank;

  at::Tensor step(const at::Tensor& gradient) { return OneRank::step(gradient, {1, 1, steps++}); }

  at::Tensor random_gradient() const {
    return at::randn({plan.gradient_numel}, c10::dtype(at::kDouble));
  }

  // The part of a bucket that holds the matrix of this index.
  at::Tensor part(const at::Tensor& bucket, size_t i) const {
    const PlannedMatrix& matrix = plan.matrices[i];
    const auto [rows, cols] = matrix.shape;
    return bucket.narrow(0, matrix.gradient_offset, rows * cols).view({rows, cols});
  }

  uint64_t steps = 0;
};

double distance_from_identity(const at::Tensor& columns) {
  const at::Tensor x = columns.to(at::kDouble);
  return (x.t().matmul(x) - at::eye(x.size(1), x.options())).abs().max().item<double>();
}

TEST(AlternatingCompressor, SendsPAndQInTurns) {
  Bucket bucket(make_options());
  const int64_t tail = 5 + 2 + 1;  // the raw segment, two activities, the count
  const std::vector<int64_t> numel = {(17 + 40) * 3 + tail, (33 + 24) * 3 + tail};
  for (int i = 0; i < 4; ++i) {
    bucket.step(bucket.random_gradient().to(at::kFloat));
    EXPECT_EQ(bucket.compressor->sends(), i % 2 == 0 ? Factors::kP : Factors::kQ);
    EXPECT_EQ(bucket.compressor->payload_bytes(), numel[static_cast<size_t>(i % 2)] * 4);
  }
}

// The definition, in float64: each step projects M = G + E onto the basis that the step before has
// left. The basis of the next step is that of the factor that was sent.
TEST(AlternatingCompressor, EachStepProjectsOnTheBasisOfTheOneBefore) {
  Bucket bucket(make_options(), at::kDouble);
  std::vector<at::Tensor> residual_before(2), q_basis(2), p_basis(2);
  for (int i = 0; i < 7; ++i) {
    const at::Tensor gradient = bucket.random_gradient();
    const at::Tensor out = bucket.step(gradient);
    EXPECT_LT(relative(out.narrow(0, 17 * 33, 5), gradient.narrow(0, 17 * 33, 5)), 1e-15);
    for (size_t k = 0; k < 2; ++k) {
      const at::Tensor g = bucket.part(gradient, k);
      const at::Tensor m = residual_before[k].defined() ? g + residual_before[k] : g;
      ParameterState& state = *bucket.states[k];
      if (i > 0) {
        const bool q_step = i % 2 == 1;
        const at::Tensor expected = q_step ? p_basis[k].matmul(p_basis[k].t()).matmul(m)
                                           : m.matmul(q_basis[k]).matmul(q_basis[k].t());
        EXPECT_LT(relative(bucket.part(out, k), expected), 1e-12) << "step " << i;
        EXPECT_LT(relative(state.residual(), m - expected), 1e-12) << "step " << i;
        // Two bases have the same span if their projections are equal.
        const at::Tensor factor = q_step ? p_basis[k].t().matmul(m).t() : m.matmul(q_basis[k]);
        const at::Tensor basis = std::get<0>(at::linalg_qr(factor));
        const at::Tensor left = q_step ? state.q_warm.t() : state.p_hat;
        EXPECT_LT(distance_from_identity(left), 1e-14);
        EXPECT_LT(relative(left.matmul(left.t()), basis.matmul(basis.t())), 1e-10);
      }
      residual_before[k] = state.residual();
      q_basis[k] = state.q_warm.t().clone();
      p_basis[k] = state.p_hat.clone();
    }
  }
}

TEST(AlternatingCompressor, ASkippedStepLeavesTheResidualAndTheFactors) {
  for (const int bad : {0, 1, 4, 5}) {
    Bucket bucket(make_options());
    for (int i = 0; i < bad; ++i) bucket.step(bucket.random_gradient().to(at::kFloat));
    if (bad == 0) {  // allocates
      at::Tensor zero = at::zeros({bucket.plan.gradient_numel});
      bucket.compressor->project(zero, {1, 1, 0});
      bucket.compressor->rollback();
      for (auto& state : bucket.states) state->sent_p = false;
    }
    const at::Tensor e = bucket.states[1]->residual(), p = bucket.states[1]->p_hat.clone(),
                     q = bucket.states[1]->q_warm.clone();
    at::Tensor gradient = bucket.random_gradient().to(at::kFloat);
    gradient[3] = std::numeric_limits<float>::infinity();
    EXPECT_TRUE(bucket.step(gradient).isnan().all().item<bool>());
    EXPECT_TRUE(at::equal(bucket.states[1]->p_hat, p)) << bad;
    EXPECT_TRUE(at::equal(bucket.states[1]->q_warm, q)) << bad;
    // The tolerance is one rounding of M, whose elements are below 20.
    const at::Tensor difference = bucket.states[1]->residual() - e;
    EXPECT_LT(difference.abs().max().item<double>(), 20 * 0x1p-24 * 2) << bad;
  }
}

TEST(AlternatingCompressor, AMatrixThatIsOutOfUseKeepsItsResidualAndItsFactors) {
  for (const int unused : {4, 5}) {
    Bucket bucket(make_options());
    for (int i = 0; i < unused; ++i) bucket.step(bucket.random_gradient().to(at::kFloat));
    ParameterState& state = *bucket.states[1];
    const at::Tensor e = state.residual(), p = state.p_hat.clone(), q = state.q_warm.clone();
    at::Tensor gradient = bucket.random_gradient().to(at::kFloat);
    bucket.part(gradient, 1).zero_();
    const at::Tensor out = bucket.step(gradient);
    EXPECT_EQ(bucket.part(out, 1).abs().max().item<float>(), 0);
    EXPECT_GT(bucket.part(out, 0).abs().max().item<float>(), 0);
    EXPECT_LT(relative(state.residual(), e), 1e-6);
    EXPECT_LT(relative(state.p_hat, p), 1e-6);
    EXPECT_LT(relative(state.q_warm, q), 1e-6);
  }
}

TEST(AlternatingCompressor, ParametersThatAreDueForUnlikeFactorsSendP) {
  Bucket bucket(make_options());
  bucket.step(bucket.random_gradient().to(at::kFloat));
  // The second matrix goes through one more step, in a bucket of its own.
  const BucketPlan alone = plan_bucket({{{40, 24}, {}}}, make_options());
  const auto other =
      make_compressor(alone, {bucket.states[1]}, make_options(), at::kFloat, at::kCPU);
  at::Tensor out = at::randn({40 * 24});
  other->project(out, {1, 1, 1});
  ASSERT_EQ(other->sends(), Factors::kQ);
  other->orthogonalize();
  other->reconstruct();
  std::vector<at::Tensor> before = {bucket.states[0]->residual(), bucket.states[1]->residual()};
  const at::Tensor gradient = bucket.random_gradient().to(at::kFloat);
  const at::Tensor output = bucket.step(gradient);
  EXPECT_EQ(bucket.compressor->sends(), Factors::kP);
  for (size_t k = 0; k < 2; ++k) {
    const at::Tensor m = bucket.part(gradient, k) + before[k];
    EXPECT_LT(relative(bucket.part(output, k) + bucket.states[k]->residual(), m), 1e-6);
  }
}

TEST(AlternatingCompressor, AFailedStepIsTakenBack) {
  for (const int failed : {1, 2}) {
    Bucket bucket(make_options());
    for (int i = 0; i < failed; ++i) bucket.step(bucket.random_gradient().to(at::kFloat));
    const at::Tensor e = bucket.states[0]->residual();
    at::Tensor gradient = bucket.random_gradient().to(at::kFloat);
    bucket.compressor->project(gradient, {1, 1, 9});
    bucket.compressor->rollback();
    EXPECT_LT((bucket.states[0]->residual() - e).abs().max().item<double>(), 20 * 0x1p-24 * 2);
  }
}

}  // namespace
}  // namespace powersgd
