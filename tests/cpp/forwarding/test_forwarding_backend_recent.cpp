// SPDX-License-Identifier: BSD-3-Clause
//
// The overrides of the functions that torch 2.14 and 2.15 add to c10d::Backend. On an older torch
// this file tests nothing.
#include "powersgd/torch_compat.h"

#ifdef POWERSGD_BACKEND_HAS_LIFECYCLE

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "powersgd/forwarding_backend.h"
#include "support/recording_backend.h"

namespace powersgd {
namespace {

using test::RecordingBackend;
using Methods = std::vector<std::string>;

constexpr c10::DeviceType kAccelerator = c10::DeviceType::Meta;
constexpr c10::DeviceType kCpu = c10::DeviceType::CPU;

class RecentTest : public ::testing::Test {
 protected:
  static Methods methods(const c10::intrusive_ptr<RecordingBackend>& recorder) {
    Methods names;
    for (const auto& call : recorder->calls) names.push_back(call.method);
    return names;
  }
  c10::intrusive_ptr<RecordingBackend> cpu_ = c10::make_intrusive<RecordingBackend>(0, 2, "slow");
  c10::intrusive_ptr<RecordingBackend> accel_ = c10::make_intrusive<RecordingBackend>(0, 2, "fast");
  c10::intrusive_ptr<ForwardingBackend> both_ =
      c10::make_intrusive<ForwardingBackend>(0, 2, Inners{{kCpu, cpu_}, {kAccelerator, accel_}});
  c10::intrusive_ptr<ForwardingBackend> one_ =
      c10::make_intrusive<ForwardingBackend>(0, 2, Inners{{kCpu, cpu_}});
};

TEST_F(RecentTest, AbortHooksGoToThePrimaryInner) {
  both_->registerAbortHook(1, [] {});
  both_->unregisterAbortHook(1);
  EXPECT_EQ(methods(cpu_), (Methods{"registerAbortHook", "unregisterAbortHook"}));
  EXPECT_TRUE(accel_->calls.empty());
}

#ifdef POWERSGD_BACKEND_HAS_COMPLETION_HOOKS
TEST_F(RecentTest, CompletionHooksGoToThePrimaryInner) {
  EXPECT_TRUE(both_->supportsAbortHooks());
  EXPECT_TRUE(both_->supportsCompletionHooks());
  both_->registerCompletionHook(2, [](const c10d::CompletionHookArgs&) {});
  both_->unregisterCompletionHook(2);
  EXPECT_EQ(methods(cpu_), (Methods{"registerCompletionHook", "unregisterCompletionHook"}));
  EXPECT_TRUE(accel_->calls.empty());
}
#endif

#ifdef POWERSGD_BACKEND_HAS_TIME_ESTIMATE
TEST_F(RecentTest, EstimatesAreTheAccelerators) {
  EXPECT_TRUE(both_->supportsTimeEstimation());
  both_->startTimeEstimate();
  EXPECT_EQ(both_->endTimeEstimate(), 2.5F);
  EXPECT_EQ(methods(accel_), (Methods{"startTimeEstimate", "endTimeEstimate"}));
  EXPECT_TRUE(cpu_->calls.empty());
}
#endif

#ifdef POWERSGD_BACKEND_HAS_IS_INITIALIZED
TEST_F(RecentTest, IsInitializedOnceAllInnersAre) {
  EXPECT_TRUE(both_->isInitialized());
  accel_->initialized = false;
  EXPECT_FALSE(both_->isInitialized());
}
#endif

TEST_F(RecentTest, WindowsAreTheAcceleratorsOrTheTensors) {
  EXPECT_TRUE(both_->supportsWindow());
  EXPECT_TRUE(both_->new_window(std::nullopt));
  EXPECT_EQ(methods(accel_), Methods{"new_window"});
  EXPECT_TRUE(both_->new_window(at::ones({2})));
  EXPECT_EQ(methods(cpu_), Methods{"new_window"});
}

TEST_F(RecentTest, LifecycleConcernsEveryInner) {
  both_->addEphemeralTimeout(std::chrono::milliseconds(5));
  both_->setBoundDeviceId(c10::Device(kAccelerator, 1));
  for (const auto& inner : {cpu_, accel_}) {
    EXPECT_EQ(methods(inner), Methods{"addEphemeralTimeout"});
    EXPECT_EQ(inner->getBoundDeviceId(), c10::Device(kAccelerator, 1));
  }
  EXPECT_EQ(both_->getBoundDeviceId(), c10::Device(kAccelerator, 1));
}

TEST_F(RecentTest, ReconfigureTakesTheInnersNewRank) {
  EXPECT_TRUE(one_->supportsReconfigure());
  EXPECT_EQ(one_->get_reconfigure_handle(), "handle of slow");
  one_->reconfigure({});
  EXPECT_EQ(one_->getRank(), 3);
  EXPECT_EQ(one_->getSize(), 5);
}

TEST_F(RecentTest, SeveralInnersCannotBeReconfigured) {
  EXPECT_FALSE(both_->supportsReconfigure());
  EXPECT_THROW(both_->get_reconfigure_handle(), c10::Error);
  EXPECT_THROW(both_->reconfigure({}), c10::Error);
}

}  // namespace
}  // namespace powersgd

#endif  // POWERSGD_BACKEND_HAS_LIFECYCLE
