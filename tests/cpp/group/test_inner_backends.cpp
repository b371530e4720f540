// SPDX-License-Identifier: BSD-3-Clause
#include "powersgd/group/inner_backends.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "group/recorded_group.h"
#include "support/errors.h"

namespace powersgd {
namespace {

using test::contains;
using test::error_of;
using test::kAccelerator;
using test::kCpu;
using test::RecordingBackend;

constexpr c10::DeviceType kOther = c10::DeviceType::XPU;  // a second type of accelerators

class InnerBackendsTest : public testing::Test {
 protected:
  test::Recorder slow_ = c10::make_intrusive<RecordingBackend>(0, 2, "slow");
  test::Recorder fast_ = c10::make_intrusive<RecordingBackend>(0, 2, "fast");
  // The CPU and an accelerator share a backend.
  const InnerBackends shared_{0, 2, {{kCpu, slow_}, {kOther, fast_}, {kAccelerator, slow_}}};
};

TEST_F(InnerBackendsTest, RefuseWhatCannotWork) {
  const auto error_with = [](Inners inners) {
    return error_of([&] { InnerBackends(1, 2, std::move(inners)); });
  };
  EXPECT_TRUE(contains(error_with({}), "at least one inner"));
  EXPECT_TRUE(contains(error_with({{kCpu, nullptr}}), "for cpu is None"));
  EXPECT_TRUE(contains(error_with({{kCpu, slow_}}), "rank 0 of 2, not 1 of 2"));
  const auto three = c10::make_intrusive<RecordingBackend>(1, 3);
  EXPECT_TRUE(contains(error_with({{kCpu, three}}), "rank 1 of 3, not 1 of 2"));
  const auto one = c10::make_intrusive<RecordingBackend>(1, 2);
  EXPECT_TRUE(contains(error_with({{kCpu, one}, {kCpu, one}}), "two inner backends for cpu"));
  EXPECT_EQ(error_with({{kCpu, one}, {kAccelerator, one}}), "no error");
}

TEST_F(InnerBackendsTest, AnErrorNamesTheDeviceAndThoseThereAre) {
  const InnerBackends inners(0, 2, {{kCpu, slow_}, {kOther, fast_}});
  EXPECT_TRUE(inners.has(kOther));
  EXPECT_EQ(inners.at(kOther).get(), fast_.get());
  EXPECT_FALSE(inners.has(kAccelerator));
  const std::string error = error_of([&] { inners.at(kAccelerator); });
  EXPECT_TRUE(contains(error,
                       "no inner backend for device type meta; this process group has "
                       "cpu (slow), xpu (fast)"))
      << error;
}

TEST_F(InnerBackendsTest, TheAcceleratorIsTheFirstDeviceBesideTheCpu) {
  EXPECT_EQ(shared_.accelerator(), kOther);
  EXPECT_EQ(InnerBackends(0, 2, {{kCpu, slow_}}).accelerator(), kCpu);
}

TEST_F(InnerBackendsTest, ABackendOfTwoDevicesIsCalledOnce) {
  std::vector<c10d::Backend*> called;
  shared_.each([&](c10d::Backend& inner) { called.push_back(&inner); });
  EXPECT_EQ(called, (std::vector<c10d::Backend*>{slow_.get(), fast_.get()}));
}

TEST_F(InnerBackendsTest, AllAreCalledAndTheFirstExceptionIsThrown) {
  int calls = 0;
  const std::string error = error_of([&] {
    shared_.each([&](c10d::Backend& inner) {
      ++calls;
      throw std::runtime_error(inner.getBackendName());
    });
  });
  EXPECT_EQ(calls, 2);
  EXPECT_EQ(error, "slow");
}

TEST_F(InnerBackendsTest, DevicesThatShareABackendShareItsChild) {
  const std::vector<BackendPtr> made = {c10::make_intrusive<RecordingBackend>(),
                                        c10::make_intrusive<RecordingBackend>()};
  std::vector<BackendPtr> parents;
  const Inners children = shared_.children([&](const BackendPtr& parent, size_t i) {
    parents.push_back(parent);
    return made[i];
  });
  EXPECT_EQ(parents, (std::vector<BackendPtr>{slow_, fast_}));
  EXPECT_EQ(children, (Inners{{kCpu, made[0]}, {kOther, made[1]}, {kAccelerator, made[0]}}));
}

}  // namespace
}  // namespace powersgd
