// SPDX-License-Identifier: BSD-3-Clause
//
// What both engines do.
#include "engine/engine.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <memory>
#include <stdexcept>
#include <vector>

#include "engine/jobs.h"
#include "engine/stream_engine.h"
#include "engine/thread_engine.h"
#include "fake_device/fake_device.h"
#include "ranks/two_equal_ranks.h"
#include "support/errors.h"

namespace powersgd {
namespace {

namespace fake = test::fake_device;
using test::error_of;
using test::job_of;

class AnyEngine : public testing::TestWithParam<bool> {  // whether it is ordered by streams
 protected:
  AnyEngine() {
    fake::reset(0, fake::Host::kMayNotWait);
    if (GetParam()) {
      engine_ = std::make_unique<StreamEngine>(0, c10::make_intrusive<test::StreamBackend>());
    } else {
      engine_ = std::make_unique<ThreadEngine>(0, test::connection_of_one());
    }
  }
  test::WorkPtr submit(Job job) { return test::submit(*engine_, std::move(job), device_); }

  const c10::Device device_ = GetParam() ? fake::device(0) : c10::Device(at::kCPU);
  std::unique_ptr<Engine> engine_;
};

INSTANTIATE_TEST_SUITE_P(Engines, AnyEngine, testing::Bool(),
                         [](const auto& info) { return info.param ? "Stream" : "Thread"; });

TEST_P(AnyEngine, WhatAPartThrowsIsItsWorksAndTheNextJobRuns) {
  const auto fail = [](Channel&) { throw std::runtime_error("bad"); };
  const auto first = submit(job_of(fail, [](Channel&) { FAIL() << "ran after a failure"; }));
  const auto second = submit(job_of(fail));
  const auto good = submit(job_of([](Channel&) {}));
  for (const auto& bad : {first, second}) {
    EXPECT_EQ(error_of([&] { bad->wait(); }), "bad");
    EXPECT_TRUE(bad->isCompleted());
    EXPECT_FALSE(bad->isSuccess());
    EXPECT_TRUE(bad->exception());
    EXPECT_EQ(error_of([&] { bad->getFuture()->waitAndThrow(); }), "bad");
    if (!GetParam()) {  // else the result is in the order of the stream
      EXPECT_EQ(error_of([&] { bad->result(); }), "bad");
    }
  }
  EXPECT_TRUE(good->wait());
  EXPECT_TRUE(good->isSuccess());
}

TEST_P(AnyEngine, TheResultIsTheTensorsThatWereSubmitted) {
  const at::Tensor tensor = at::zeros({3});
  const auto work =
      engine_->submit({tensor}, job_of([](Channel&) {}), device_, c10d::kUnsetTimeout);
  work->wait();
  EXPECT_TRUE(work->result().front().is_same(tensor));
}

TEST_P(AnyEngine, TakesNoJobOnceItIsClosed) {
  submit(job_of([](Channel&) {}));
  for (const auto end : {&Engine::shutdown, &Engine::abort, &Engine::shutdown}) {
    (*engine_.*end)();
    EXPECT_THROW(submit(job_of([](Channel&) {})), c10::Error);
  }
}

TEST_P(AnyEngine, AutogradDoesNotRecordAJob) {
  std::vector<bool> recorded;
  const auto part = [&](Channel&) { recorded.push_back(at::GradMode::is_enabled()); };
  ASSERT_TRUE(at::GradMode::is_enabled());
  submit(job_of(part, part))->wait();
  EXPECT_EQ(recorded, (std::vector<bool>{false, false}));
  EXPECT_TRUE(at::GradMode::is_enabled());
}

}  // namespace
}  // namespace powersgd
