// SPDX-License-Identifier: BSD-3-Clause
//
// The overrides of the functions that torch 2.14 and 2.15 add to c10d::Backend. On an older torch
// this file tests nothing.
#include "powersgd/group/torch_compat.h"

#ifdef POWERSGD_BACKEND_HAS_LIFECYCLE

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "group/recorded_group.h"

namespace powersgd {
namespace {

using test::kAccelerator;
using test::kCpu;
using test::Methods;

class RecentTest : public test::RecordedGroup {};

TEST_F(RecentTest, AbortHooksGoToThePrimaryInner) {
  backend_->registerAbortHook(1, [] {});
  backend_->unregisterAbortHook(1);
  EXPECT_EQ(cpu_->methods(), (Methods{"registerAbortHook", "unregisterAbortHook"}));
  EXPECT_TRUE(accel_->calls.empty());
}

#ifdef POWERSGD_BACKEND_HAS_COMPLETION_HOOKS
TEST_F(RecentTest, CompletionHooksGoToThePrimaryInner) {
  EXPECT_TRUE(backend_->supportsAbortHooks());
  EXPECT_TRUE(backend_->supportsCompletionHooks());
  backend_->registerCompletionHook(2, [](const c10d::CompletionHookArgs&) {});
  backend_->unregisterCompletionHook(2);
  EXPECT_EQ(cpu_->methods(), (Methods{"registerCompletionHook", "unregisterCompletionHook"}));
  EXPECT_TRUE(accel_->calls.empty());
}
#endif

#ifdef POWERSGD_BACKEND_HAS_TIME_ESTIMATE
TEST_F(RecentTest, EstimatesAreTheAccelerators) {
  EXPECT_TRUE(backend_->supportsTimeEstimation());
  backend_->startTimeEstimate();
  EXPECT_EQ(backend_->endTimeEstimate(), 2.5F);
  EXPECT_EQ(accel_->methods(), (Methods{"startTimeEstimate", "endTimeEstimate"}));
  EXPECT_TRUE(cpu_->calls.empty());
}
#endif

#ifdef POWERSGD_BACKEND_HAS_IS_INITIALIZED
TEST_F(RecentTest, IsInitializedOnceAllInnersAre) {
  EXPECT_TRUE(backend_->isInitialized());
  accel_->initialized = false;
  EXPECT_FALSE(backend_->isInitialized());
}
#endif

TEST_F(RecentTest, WindowsAreTheAcceleratorsOrTheTensors) {
  EXPECT_TRUE(backend_->supportsWindow());
  EXPECT_TRUE(backend_->new_window(std::nullopt));
  EXPECT_EQ(accel_->methods(), Methods{"new_window"});
  EXPECT_TRUE(backend_->new_window(at::ones({2})));
  EXPECT_EQ(cpu_->methods(), Methods{"new_window"});
}

TEST_F(RecentTest, LifecycleConcernsEveryInner) {
  backend_->addEphemeralTimeout(std::chrono::milliseconds(5));
  backend_->setBoundDeviceId(c10::Device(kAccelerator, 1));
  for (const auto& inner : {cpu_, accel_}) {
    EXPECT_EQ(inner->methods(), Methods{"addEphemeralTimeout"});
    EXPECT_EQ(inner->getBoundDeviceId(), c10::Device(kAccelerator, 1));
  }
  EXPECT_EQ(backend_->getBoundDeviceId(), c10::Device(kAccelerator, 1));
}

TEST_F(RecentTest, ReconfigureTakesTheInnersNewRank) {
  ForwardingBackend one(0, 2, {{kCpu, cpu_}});
  EXPECT_TRUE(one.supportsReconfigure());
  EXPECT_EQ(one.get_reconfigure_handle(), "handle of slow");
  one.reconfigure({});
  EXPECT_EQ(one.getRank(), 3);
  EXPECT_EQ(one.getSize(), 5);
}

TEST_F(RecentTest, SeveralInnersCannotBeReconfigured) {
  EXPECT_FALSE(backend_->supportsReconfigure());
  EXPECT_THROW(backend_->get_reconfigure_handle(), c10::Error);
  EXPECT_THROW(backend_->reconfigure({}), c10::Error);
}

}  // namespace
}  // namespace powersgd

#endif  // POWERSGD_BACKEND_HAS_LIFECYCLE
