// SPDX-License-Identifier: BSD-3-Clause
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <limits>
#include <optional>
#include <vector>

#include "powersgd/compressor/compressor.h"
#include "powersgd/kernels/packets.h"
#include "ranks/one_rank.h"
#include "support/hook_defaults.h"

namespace powersgd {
namespace {

using test::OneRank;
using test::relative;

at::Tensor bias_of(const at::Tensor& bucket) {
  return bucket.narrow(0, OneRank::kBias, OneRank::kBiasNumel);
}

// Takes steps. Returns by how much the outputs and what is left miss the gradients.
double error_of_steps(OneRank& rank, uint64_t steps) {
  at::Tensor sent = at::zeros({rank.plan.gradient_numel}, at::kDouble);
  at::Tensor gradients = at::zeros_like(sent);
  for (uint64_t step = 0; step < steps; ++step) {
    const at::Tensor gradient = at::randn({rank.plan.gradient_numel});
    gradients += gradient;
    sent += rank.step(gradient, {1, 1, step});
  }
  return relative(sent + rank.residuals(), gradients);
}

// The wire. A rank that is alone sends what it has rounded, and keeps the rest.
class Wires : public testing::TestWithParam<std::optional<WireDType>> {
 protected:
  const Options options_ = test::compressing(2, GetParam());
  OneRank rank_{options_};
};

INSTANTIATE_TEST_SUITE_P(Compressor, Wires,
                         testing::Values(std::nullopt, WireDType::kBFloat16, WireDType::kInt8,
                                         WireDType::kInt4),
                         [](const auto& wire) { return test::name_of(wire.param); });

TEST_P(Wires, OutputsAndResidualsAddUpToTheGradients) {
  ASSERT_EQ(rank_.plan.matrices.size(), 2u);
  // The tolerance is the float32 rounding of 20 sums.
  EXPECT_LT(error_of_steps(rank_, 20), 1e-5);
  // The residual holds a part of them: else this shows nothing.
  EXPECT_GT(rank_.residuals().norm().item<double>(), 1);
}

TEST_P(Wires, RawSegmentsAreExactAndScaled) {
  const at::Tensor gradient = at::randn({rank_.plan.gradient_numel});
  const at::Tensor out = rank_.step(gradient, {0.5, 1, 0});
  EXPECT_TRUE(at::equal(bias_of(out), bias_of(gradient) * 0.5));
}

// The scale is a number of the host or of the device. A power of two changes no rounding.
TEST_P(Wires, TheLossScaleTakesResidualsAlong) {
  OneRank scaled(options_);
  for (uint64_t step = 0; step < 6; ++step) {
    const double scale = step < 3 ? 1.0 : 1024.0;
    const at::Tensor gradient = at::randn({rank_.plan.gradient_numel});
    const at::Tensor expected = rank_.step(gradient, {1, 1, step}) * scale;
    StepInfo info{1, 1, step};
    if (step % 2 == 0) {
      info.units = scale;
    } else {
      info.loss_scale = at::full({1}, scale);
    }
    EXPECT_TRUE(at::equal(scaled.step(gradient * scale, info), expected)) << step;
  }
}

TEST_P(Wires, AStepThatDeliversNothingLeavesTheResiduals) {
  const at::Tensor gradient = at::randn({rank_.plan.gradient_numel});
  rank_.step(gradient, {1, 1, 0});
  const at::Tensor before = rank_.residuals();
  for (const int64_t place : {int64_t{3}, OneRank::kBias + 3}) {
    at::Tensor bad = gradient.clone();
    bad[place] = std::numeric_limits<float>::infinity();
    EXPECT_TRUE(rank_.step(bad, {1, 1, 1}).isnan().all().item<bool>());
    EXPECT_LT(relative(rank_.residuals(), before), 1e-6);  // one rounding of M
  }
}

TEST_P(Wires, CountsTheBytesThatItSends) {
  EXPECT_EQ(rank_.compressor->gradient_bytes(), 4 * (17 * 33 + 5 + 40 * 24));
  const int64_t sent = rank_.compressor->payload_bytes();
  if (!GetParam()) {
    const int64_t p = 2 * (17 + 40) + 5 + 2 + 1, q = 2 * (33 + 24);
    EXPECT_EQ(sent, 4 * (p + q));
    return;
  }
  // A group of 64 elements for each column of P and each row of Q.
  const int64_t least = 8 * kernels::group_bytes(*GetParam()) + 4 * OneRank::kBiasNumel + 3;
  EXPECT_GE(sent, least);
  EXPECT_LE(sent, least + 2 * 64 + 8 * 16);  // alignment
}

// Other dtypes.

TEST(Compressor, AResidualInBfloat16LosesItsRoundingAlone) {
  Options options = test::compressing(2);
  options.residual_dtype = DType::kBFloat16;
  OneRank rank(options);
  // Rounding M loses 2^-9 of it, once a step.
  EXPECT_LT(error_of_steps(rank, 5), 2e-2);
  EXPECT_EQ(rank.states[0]->memory.scalar_type(), at::kBFloat16);
}

// States.

TEST(Compressor, RollbackLosesNothing) {
  OneRank rank(test::compressing(2));
  const at::Tensor gradient = at::randn({rank.plan.gradient_numel});
  rank.step(gradient, {1, 1, 0});
  const at::Tensor before = rank.residuals();
  const at::Tensor warm = rank.states[0]->q_warm.clone();
  at::Tensor out = gradient.clone();
  rank.compressor->project(out, {1, 1, 1});
  rank.compressor->orthogonalize();
  rank.compressor->rollback();
  EXPECT_LT(relative(rank.residuals(), before), 1e-6);  // one rounding of M
  EXPECT_TRUE(at::equal(out, gradient));
  EXPECT_TRUE(at::equal(rank.states[0]->q_warm, warm));
}

TEST(Compressor, ABucketThatIsRebuiltKeepsItsResiduals) {
  const Options options = test::compressing(2);
  OneRank rank(options);
  rank.step(at::randn({rank.plan.gradient_numel}), {1, 1, 0});
  const at::Tensor before = rank.states[1]->residual().clone();
  // Another layout has the second matrix alone.
  const BucketPlan plan = plan_bucket({{{40, 24}, {}}}, options);
  const auto rebuilt = make_compressor(plan, {rank.states[1]}, options, at::kFloat, at::kCPU);
  // A gradient of zeros would put the parameter out of use.
  at::Tensor out = at::full({40 * 24}, 1e-20);
  rebuilt->project(out, {1, 1, 1});
  rebuilt->orthogonalize();
  rebuilt->back_project();
  rebuilt->reconstruct();
  const at::Tensor left = out.view({40, 24}).to(at::kDouble) + rank.states[1]->residual();
  EXPECT_LT(relative(left, before), 1e-5);
}

TEST(Compressor, WithoutErrorFeedbackThereIsNoMemory) {
  Options options = test::compressing(2);
  options.use_error_feedback = false;
  OneRank rank(options);
  rank.step(at::randn({rank.plan.gradient_numel}));
  EXPECT_FALSE(rank.states[0]->memory.defined());
  EXPECT_EQ(rank.residuals().norm().item<double>(), 0);
}

TEST(Compressor, AParameterOutOfUseKeepsItsResidual) {
  OneRank rank(test::compressing(2));
  rank.step(at::randn({rank.plan.gradient_numel}), {1, 1, 0});
  const at::Tensor before = rank.states[0]->residual();
  const at::Tensor warm = rank.states[0]->q_warm.clone();
  at::Tensor gradient = at::randn({rank.plan.gradient_numel});
  gradient.narrow(0, 0, 17 * 33).zero_();
  StepInfo info;
  info.uses = {Use::kUnused, Use::kUsed, Use::kUsed};
  for (info.step = 1; info.step < 4; ++info.step) {
    const at::Tensor out = rank.step(gradient, info);
    EXPECT_TRUE(at::equal(out.narrow(0, 0, 17 * 33), at::zeros({17 * 33})));
    EXPECT_NE(out.narrow(0, 17 * 33 + 5, 40 * 24).norm().item<double>(), 0);
    // The first of these steps subtracts what was delivered before, and rounds in another order.
    EXPECT_LT(relative(rank.states[0]->residual(), before), 1e-6);
    EXPECT_TRUE(at::equal(rank.states[0]->q_warm, warm));
  }
}

TEST(Compressor, TheOldGradientOfAParameterOutOfUseCountsNowhere) {
  OneRank rank(test::compressing(2));
  rank.step(at::randn({rank.plan.gradient_numel}), {1, 1, 0});
  StepInfo info;
  info.units = 4;  // the loss scale has changed, too
  info.uses = {Use::kStale, Use::kUsed, Use::kUsed};
  std::vector<at::Tensor> before;
  for (const at::Tensor& tensor : rank.states[0]->step_tensors()) before.push_back(tensor.clone());
  for (info.step = 1; info.step < 4; ++info.step) {
    at::Tensor gradient = at::randn({rank.plan.gradient_numel});
    if (info.step == 3) gradient[17 * 33 + 7] = std::numeric_limits<float>::quiet_NaN();
    const at::Tensor out = rank.step(gradient, info);
    EXPECT_TRUE(at::equal(out.narrow(0, 0, 17 * 33), gradient.narrow(0, 0, 17 * 33)));
    const std::vector<at::Tensor> after = rank.states[0]->step_tensors();
    for (size_t i = 0; i < after.size(); ++i) EXPECT_TRUE(at::equal(after[i], before[i])) << i;
    EXPECT_EQ(rank.states[0]->q_norms.norm().item<double>(), 0);
  }
  // After an exception the gradient is taken back from the others, and here the state put back.
  rank.compressor->project(at::randn({rank.plan.gradient_numel}), info);
  rank.compressor->rollback();
  EXPECT_TRUE(at::equal(rank.states[0]->memory, before.back()));
}

TEST(Compressor, ADiscardedStepLeavesNothing) {
  for (const bool feedback : {true, false}) {
    Options options = test::compressing(2);
    options.allow_discard = true;
    options.use_error_feedback = feedback;
    OneRank rank(options), other(options);
    for (uint64_t step = 0; step < 4; ++step) {
      const at::Tensor gradient = at::randn({rank.plan.gradient_numel});
      EXPECT_TRUE(at::equal(rank.step(gradient, {1, 1, step}), other.step(gradient, {1, 1, step})));
      rank.step(1e4 * at::randn({rank.plan.gradient_numel}), {1, 2, step});
      for (const ParameterStatePtr& state : rank.states) state->discard_step();
    }
  }
}

TEST(Compressor, SetResidualIsReadBack) {
  OneRank rank(test::compressing(2));
  rank.step(at::randn({rank.plan.gradient_numel}));
  const at::Tensor value = at::randn({17, 33});
  rank.states[0]->set_residual(value);
  EXPECT_TRUE(at::equal(rank.states[0]->residual(), value));
}

TEST(Compressor, OtherDtypesAreAnError) {
  EXPECT_THROW(to_dtype(at::kDouble), c10::Error);
  EXPECT_FALSE(is_compressible(at::kDouble));
  EXPECT_FALSE(is_compressible(at::kLong));
}

}  // namespace
}  // namespace powersgd
