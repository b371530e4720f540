// SPDX-License-Identifier: BSD-3-Clause
//
// A compressed step on a device is its stages and its collectives: torch runs no operator there.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "fake_device/fake_device.h"
#include "group/compressed_step.h"
#include "group/sessions.h"
#include "powersgd/group/stats.h"
#include "ranks/one_rank.h"
#include "support/hook_defaults.h"

namespace powersgd {
namespace {

namespace fake = test::fake_device;

constexpr uint64_t kCounted = 4;  // steps

// Returns the number of torch's operators on the device that `step` has called.
size_t operators_of(const std::function<void()>& step) {
  const size_t before = fake::usage().operators;
  step();
  return fake::usage().operators - before;
}

enum class Scale { kNone, kOfHost, kOfDevice };

using WireAndScale = std::tuple<std::optional<WireDType>, Scale>;

class StepOperators : public testing::TestWithParam<WireAndScale> {
 protected:
  StepOperators() {
    fake::add_operators();
    fake::reset(1, fake::Host::kMayNotWait);
    loss_scale_ = at::ones({}, device_);
  }

  static Scale scale() { return std::get<1>(GetParam()); }
  const at::Device device_ = fake::device(0);
  at::Tensor loss_scale_;
  const Options options_ = test::compressing(2, std::get<0>(GetParam()));
};

// Two ranks gather.
TEST_P(StepOperators, OfAnAttachedModelAreNone) {
  const auto session = test::session_of_equal_ranks(device_, options_);
  const auto model = test::attach(session, test::zeros({{24, 32}, {24}, {20, 36}}, device_));
  at::Tensor buffer = at::ones({24 * 32 + 24 + 20 * 36}, device_);
  if (scale() == Scale::kOfDevice) model->states()->set_loss_scale(loss_scale_);
  for (uint64_t step = 0; step < kCounted; ++step) {
    if (scale() == Scale::kOfHost) model->states()->set_grad_scale(1 << step);
    if (scale() == Scale::kOfDevice) loss_scale_.fill_(1 << step);
    const auto called = operators_of([&] {
      model->reduce(0, buffer, {0, 1, 2}, 2)->wait();
      model->end_step();
    });
    if (step > 0) {  // the first one allocates
      EXPECT_EQ(called, 0u) << "step " << step;
    }
    fake::run();
  }
  EXPECT_EQ(session->stats()->host_counts().compressed_calls, static_cast<int64_t>(kCounted));
}

// A channel of three ranks. What it delivers does not matter here.
struct SilentChannel : Channel {
  void allreduce(at::Tensor&) override { calls.emplace_back("all-reduce"); }
  void allgather(at::Tensor&, at::Tensor&, const Members*) override {
    calls.emplace_back("gather");
  }
  void alltoall(at::Tensor&, at::Tensor&, const Members*) override {
    calls.emplace_back("all-to-all");
  }
  std::vector<std::string> calls;
};

using Calls = std::vector<std::string>;

class OperatorsOfSchedules : public StepOperators {
 protected:
  // Steps of rank 0, which call `expected` operators and collectives.
  void expect_steps(const Ranks& ranks, size_t expected, const Calls& calls) {
    if (!options_.wire_dtype) return;  // elements are all-reduced
    const test::OneRank rank(options_, at::kFloat, device_, ranks);
    const at::Tensor gradient = at::ones({rank.plan.gradient_numel}, device_);
    for (uint64_t step = 0; step < kCounted; ++step) {
      StepInfo info{1.0 / ranks.count, 1, step};
      if (scale() == Scale::kOfHost) info.units = 1 << step;
      if (scale() == Scale::kOfDevice) info.loss_scale = loss_scale_;
      const Job job =
          compressed_step(rank.compressor, gradient, info, std::make_shared<Stats>(), nullptr);
      SilentChannel channel;
      const auto called = operators_of([&] {
        for (const auto& part : job.parts) part(channel);
      });
      if (step > 0) {
        EXPECT_EQ(called, expected) << "step " << step;
      }
      EXPECT_EQ(channel.calls, calls);
      fake::run();
    }
  }
};

TEST_P(OperatorsOfSchedules, OfTwoShotAreNone) {
  expect_steps({0, 3, true, Schedule::kTwoShot}, 0,
               {"all-to-all", "gather", "all-to-all", "gather"});
}

// Each payload has a copy and an addition for the two ranks of a host.
TEST_P(OperatorsOfSchedules, OfTwoLevelsAddWithinTheHost) {
  expect_steps({0, 4, true, Schedule::kOneShot, levels_of({0, 1, 0, 1}, 0)}, 2 * 2,
               {"all-to-all", "gather", "gather", "all-to-all", "gather", "gather"});
}

std::string name_of_case(const testing::TestParamInfo<WireAndScale>& info) {
  const auto& [wire, scale] = info.param;
  const char* scales[] = {"", "_scale_of_host", "_scale_of_device"};
  return test::name_of(wire) + scales[static_cast<size_t>(scale)];
}

const auto kCases = testing::Combine(
    testing::Values(std::nullopt, WireDType::kBFloat16, WireDType::kInt8, WireDType::kInt4),
    testing::Values(Scale::kNone, Scale::kOfHost, Scale::kOfDevice));
INSTANTIATE_TEST_SUITE_P(Wires, StepOperators, kCases, name_of_case);
INSTANTIATE_TEST_SUITE_P(Wires, OperatorsOfSchedules, kCases, name_of_case);

}  // namespace
}  // namespace powersgd
