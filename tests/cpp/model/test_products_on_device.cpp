// SPDX-License-Identifier: BSD-3-Clause
//
// Matrix ranks above 32, on a device whose kernels leave such products to torch.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <limits>
#include <optional>
#include <vector>

#include "fake_device/fake_device.h"
#include "model/device_outcomes.h"
#include "ranks/one_rank.h"
#include "support/hook_defaults.h"
#include "support/random.h"

namespace powersgd {
namespace {

namespace fake = test::fake_device;

struct Products {
  const char* name;
  int64_t rank;
  at::ScalarType gradient = at::kFloat;
  DType residual = DType::kFloat32;
  std::optional<WireDType> wire = std::nullopt;
  bool error_feedback = true;
  double tolerance = 1e-4;
  double rounding = 1e-5;  // of the sum of outputs and residuals
};

const std::vector<ParameterShape> kShapesOfProducts = {
    {{100, 90}, {}}, {{1}, {}}, {{170, 300}, {}}};

Options options_of_products(const Products& mode) {
  Options options = test::compressing(mode.rank, mode.wire);
  options.residual_dtype = mode.residual;
  options.use_error_feedback = mode.error_feedback;
  options.min_compression_rate = 0.5;
  return options;
}

at::Tensor first_of(const at::Tensor& bucket) { return bucket.narrow(0, 0, 9000).view({100, 90}); }

// Rows 40 to 44 of the first matrix are zeros.
at::Tensor gradient_of_products(const Products& mode, uint64_t step) {
  at::Tensor gradient = test::random(step, {9000 + 1 + 170 * 300});
  first_of(gradient).narrow(0, 40, 5).zero_();
  return gradient.to(mode.gradient);
}

// Returns what steps of all kinds give and leave. Every P has full rank.
std::vector<at::Tensor> steps_of_products(const Products& mode, at::Device device) {
  test::OneRank rank(options_of_products(mode), mode.gradient, device, {}, kShapesOfProducts);
  EXPECT_EQ(rank.plan.matrices.size(), 2u);
  std::vector<at::Tensor> outcome;
  for (uint64_t step = 0; step < 7; ++step) {
    at::Tensor gradient = gradient_of_products(mode, step);
    StepInfo info{0.5, 1, step};
    if (step == 2) info.loss_scale = at::full({1}, 4.0, at::device(device));
    if (step == 4) info.uses = {Use::kUsed, Use::kUsed, Use::kStale};
    if (step == 5) gradient[9100] = std::numeric_limits<float>::infinity();
    outcome.push_back(rank.step(gradient.to(device), info).cpu());
    outcome.push_back(rank.residuals().cpu());
    for (const ParameterStatePtr& state : rank.states) {
      outcome.push_back(at::matmul(state->p_hat, state->p_hat.t()).cpu());
      outcome.push_back(state->q_norms.square().sum().cpu());
    }
  }
  rank.compressor->project(gradient_of_products(mode, 7).to(device), {1, 1, 7});
  rank.compressor->rollback();
  outcome.push_back(rank.residuals().cpu());
  return outcome;
}

class ProductsOnDevice : public testing::TestWithParam<Products> {};

TEST_P(ProductsOnDevice, AreThoseOfTheCpu) {
  fake::add_operators();
  test::DeviceOutcomes outcomes(steps_of_products(GetParam(), at::kCPU), GetParam().tolerance);
  test::in_any_order(fake::Host::kMayWait, [&] {
    fake::use_new_stream(fake::device(0));
    outcomes.expect_same(steps_of_products(GetParam(), fake::device(0)));
  });
}

// Each step has another rank, down to 0, so that columns of P depend on those before them.
TEST_P(ProductsOnDevice, LoseNothingWhereColumnsAreDead) {
  const Products& mode = GetParam();
  fake::add_operators();
  fake::reset(1, fake::Host::kMayWait);
  fake::use_new_stream(fake::device(0));
  test::OneRank rank(options_of_products(mode), mode.gradient, fake::device(0), {},
                     kShapesOfProducts);
  at::Tensor given = at::zeros({9000 + 1 + 170 * 300}, at::kDouble), sent = given.clone();
  for (uint64_t step = 0; step < 7; ++step) {
    const at::Tensor gradient = gradient_of_products(mode, step);
    first_of(gradient).narrow(1, 0, 90 - 15 * step).zero_();
    const at::Tensor output = rank.step(gradient.to(fake::device(0)), {1, 1, step}).cpu();
    EXPECT_EQ(first_of(output).narrow(0, 40, 5).abs().max().item<double>(), 0);
    given += gradient;
    sent += output;
  }
  if (mode.error_feedback) {
    EXPECT_LT(test::relative(sent + rank.residuals().cpu(), given), mode.rounding);
  }
  EXPECT_TRUE(sent.isfinite().all().item<bool>());
}

INSTANTIATE_TEST_SUITE_P(
    Modes, ProductsOnDevice,
    testing::Values(
        Products{"rank_33", 33}, Products{"rank_48", 48}, Products{"rank_128", 128},
        Products{"no_feedback", 40, at::kFloat, DType::kFloat32, std::nullopt, false},
        Products{"int8", 40, at::kFloat, DType::kFloat32, WireDType::kInt8, true, 3e-2},
        Products{"int4", 40, at::kFloat, DType::kFloat32, WireDType::kInt4, true, 3e-1},
        Products{"bfloat16", 40, at::kBFloat16, DType::kBFloat16, std::nullopt, true, 5e-2, 2e-2},
        Products{"float16", 40, at::kHalf, DType::kFloat32, std::nullopt, true, 1e-2, 2e-3}),
    [](const auto& mode) { return mode.param.name; });

}  // namespace
}  // namespace powersgd
