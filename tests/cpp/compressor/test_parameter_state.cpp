// SPDX-License-Identifier: BSD-3-Clause
#include "powersgd/compressor/parameter_state.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "ranks/one_rank.h"
#include "support/hook_defaults.h"

namespace powersgd {
namespace {

constexpr MatrixShape kShape{20, 30};

ParameterStatePtr allocated(uint64_t random_id, const Options& options = {}) {
  auto state = std::make_shared<ParameterState>(random_id);
  ParameterState::allocate({{state.get(), kShape, 2}}, options, at::kCPU);
  return state;
}

// A state whose last step delivered something.
ParameterStatePtr after_a_step() {
  ParameterStatePtr state = allocated(1);
  state->memory.copy_(at::sin(at::arange(600, at::kFloat)).view({20, 30}));
  state->p_hat.copy_(at::cos(at::arange(40, at::kFloat)).view({20, 2}));
  state->q_local.copy_(at::cos(at::arange(60, at::kFloat)).view({2, 30}));
  return state;
}

TEST(ParameterState, StartsFromNumbersOfItsRandomId) {
  EXPECT_TRUE(at::equal(allocated(3)->q_warm, allocated(3)->q_warm));
  EXPECT_FALSE(at::equal(allocated(3)->q_warm, allocated(4)->q_warm));
}

TEST(ParameterState, HasNoResidualBeforeTheFirstStep) {
  EXPECT_EQ(allocated(1)->residual().abs().max().item<float>(), 0);
}

TEST(ParameterState, TheResidualIsWhatTheLastStepLeft) {
  const ParameterStatePtr state = after_a_step();
  const at::Tensor delivered = state->p_hat.to(at::kDouble).matmul(state->q_local.to(at::kDouble));
  EXPECT_TRUE(at::equal(state->residual(), state->memory - delivered.to(at::kFloat)));
  state->mark_undelivered();
  EXPECT_TRUE(at::equal(state->residual(), state->memory));
}

// set_float32_matmul_precision("high") makes some processors round operands to 10 bits or less.
TEST(ParameterState, WhatWasDeliveredIsNotRoundedBeforeItIsSummed) {
  const ParameterStatePtr state = allocated(1);
  const float e = std::ldexp(1.0F, -12);
  state->p_hat.narrow(0, 0, 2).copy_(at::tensor({1 + e, 1.0F, 1.0F, 1 + e}).view({2, 2}));
  state->q_local.narrow(1, 0, 2).copy_(
      at::tensor({1 + e, -1 - 2 * e, -1 - 2 * e, 1 + e}).view({2, 2}));
  // In float32, (1 + e)^2 is 1 + 2 e. So whichever term comes first, one of these would be 0.
  const at::Tensor residual = state->residual();
  EXPECT_EQ(residual[0][0].item<float>(), -e * e);
  EXPECT_EQ(residual[1][1].item<float>(), -e * e);
}

TEST(ParameterState, ADroppedStepIsMarkedUndelivered) {
  for (const double dropped : {0.0, 1.0}) {
    const std::vector<ParameterStatePtr> states = {after_a_step(),
                                                   std::make_shared<ParameterState>()};
    const at::Tensor residual = states[0]->residual();
    ParameterState::mark_undelivered(states, at::full({1}, dropped));
    EXPECT_TRUE(at::equal(states[0]->residual(), dropped == 0 ? residual : states[0]->memory));
    ParameterState::mark_undelivered(states, at::Tensor());
    EXPECT_TRUE(at::equal(states[0]->residual(), states[0]->memory));
    EXPECT_FALSE(states[1]->allocated());
  }
}

TEST(ParameterState, AGradientIsTakenBackWhereItIsFinite) {
  const ParameterStatePtr state = after_a_step();
  const at::Tensor memory = state->memory.clone();
  at::Tensor gradient = at::ones({600});
  gradient[7] = std::numeric_limits<float>::infinity();
  gradient[8] = std::numeric_limits<float>::quiet_NaN();
  state->take_back(gradient);
  at::Tensor finite = at::ones({600});
  finite.narrow(0, 7, 2).zero_();
  EXPECT_TRUE(at::equal(state->residual(), memory - finite.view({20, 30})));
}

TEST(ParameterState, StatesThatAreAllocatedTogetherAreAsThoseAllocatedAlone) {
  ParameterState first(3), second(4), third(5);
  ParameterState::allocate({{&first, kShape, 2}, {&second, {9, 7}, 3}, {&third, kShape, 2}}, {},
                           at::kCPU);
  EXPECT_TRUE(at::equal(first.q_warm, allocated(3)->q_warm));
  EXPECT_TRUE(at::equal(third.q_warm, allocated(5)->q_warm));
  EXPECT_GT(second.q_warm.norm().item<double>(), 0);
  third.memory_units.fill_(8);
  EXPECT_EQ(first.memory_units.item<double>(), 1);
}

TEST(ParameterState, AStateOfOtherUnitsIsConvertedToThoseOfItsBucket) {
  test::OneRank same(test::compressing(2)), joined(test::compressing(2));
  for (uint64_t step = 0; step < 3; ++step) {
    const at::Tensor gradient = at::randn({same.plan.gradient_numel});
    if (step == 1) {  // a power of two changes no rounding
      ParameterState& state = *joined.states[1];
      for (const at::Tensor& tensor : {state.memory, state.q_local, state.memory_units}) {
        tensor.mul_(512);
      }
    }
    EXPECT_TRUE(at::equal(same.step(gradient, {1, 8, step}), joined.step(gradient, {1, 8, step})));
  }
}

}  // namespace
}  // namespace powersgd
