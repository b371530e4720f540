// SPDX-License-Identifier: BSD-3-Clause
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <vector>

#include "fake_device/fake_device.h"
#include "group/sessions.h"
#include "model/capture_watch.h"

namespace powersgd {
namespace {

namespace fake = test::fake_device;

// A state whose last step captured so much of M, or delivered nothing.
ParameterStatePtr make_watched(at::Device device, double captured, bool delivered = true,
                               at::ScalarType residual = at::kFloat) {
  auto state = std::make_shared<ParameterState>();
  state->memory = at::full({4, 25}, 2, residual).to(device);  // |M|^2 = 400
  state->q_local = at::full({1, 25}, std::sqrt(captured * 400 / 25)).to(device);
  state->q_warm = at::ones({1, 25}).to(device);
  state->q_norms = at::full({1}, delivered ? 3.0 : 0.0, at::kDouble).to(device);
  return state;
}

class CaptureWatchOn : public testing::TestWithParam<bool> {
 protected:
  CaptureWatchOn() {
    fake::add_operators();
    fake::reset(1, fake::Host::kMayNotWait);
    session_ = test::session_of_equal_ranks(device_, {});
  }
  ~CaptureWatchOn() override { session_->shutdown(); }

  // Looks once. On the CPU the engine's thread may still be at it afterwards.
  void sample(const std::vector<ParameterStatePtr>& states) {
    watch_.sample(*session_, device_, states);
    if (device_.is_cpu()) session_->run_after_steps(device_, [] {});
  }
  std::vector<ParameterStatePtr> low() {
    if (!device_.is_cpu()) fake::run();
    return watch_.low();
  }

  const at::Device device_ = GetParam() ? fake::device(0) : at::Device(at::kCPU);
  std::shared_ptr<Session> session_;
  CaptureWatch watch_;
};

TEST_P(CaptureWatchOn, AStateIsReportedOnceAfterSoManyLowSamplesInARow) {
  const auto lower = make_watched(device_, 0.9 * CaptureWatch::kLeastCaptured);
  const auto higher = make_watched(device_, 1.1 * CaptureWatch::kLeastCaptured);
  const auto rounded =
      make_watched(device_, 0.9 * CaptureWatch::kLeastCaptured, /*delivered=*/true, at::kBFloat16);
  const auto unused = make_watched(device_, 0, /*delivered=*/false);
  const auto raw = std::make_shared<ParameterState>();
  for (int i = 1; i <= CaptureWatch::kSamples + 2; ++i) {
    sample({lower, higher, raw, unused, rounded});
    const auto expected = i == CaptureWatch::kSamples
                              ? std::vector<ParameterStatePtr>{lower, rounded}
                              : std::vector<ParameterStatePtr>{};
    EXPECT_EQ(low(), expected) << "sample " << i;
  }
}

TEST_P(CaptureWatchOn, AHigherShareInBetweenBeginsAnew) {
  const auto state = make_watched(device_, 0.01);
  for (int i = 1; i < CaptureWatch::kSamples; ++i) sample({state});
  EXPECT_TRUE(low().empty());
  state->q_local.fill_(2);
  sample({state});
  EXPECT_TRUE(low().empty());
  state->q_local.fill_(0);
  for (int i = 1; i < CaptureWatch::kSamples; ++i) sample({state});
  EXPECT_TRUE(low().empty());
  sample({state});
  EXPECT_EQ(low(), std::vector<ParameterStatePtr>{state});
}

TEST(CaptureWatch, TheHostReadsNoSampleThatHasNotEnded) {
  fake::add_operators();
  fake::reset(1, fake::Host::kMayNotWait);
  const at::Device device = fake::device(0);
  const auto session = test::session_of_equal_ranks(device, {});
  const auto state = make_watched(device, 0);
  CaptureWatch watch;
  for (int i = 0; i < CaptureWatch::kSamples; ++i) watch.sample(*session, device, {state});
  EXPECT_TRUE(watch.low().empty());
  fake::run();
  EXPECT_EQ(watch.low(), std::vector<ParameterStatePtr>{state});
}

INSTANTIATE_TEST_SUITE_P(, CaptureWatchOn, testing::Bool(),
                         [](const auto& info) { return info.param ? "device" : "cpu"; });

}  // namespace
}  // namespace powersgd
