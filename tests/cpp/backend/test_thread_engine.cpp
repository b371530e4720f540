// SPDX-License-Identifier: BSD-3-Clause
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "backend/thread_engine.h"
#include "support/thread_group.h"

namespace powersgd {
namespace {

using std::chrono::steady_clock;
constexpr auto kNoJobTimeout = c10d::kUnsetTimeout;

std::unique_ptr<ThreadEngine> make_engine() {
  return std::make_unique<ThreadEngine>(0, test::make_thread_backends(1).front());
}

// Keeps the worker busy until it is let go.
class Gate {
 public:
  Engine::Job job() {
    return [this](Lane&) {
      reached_.set_value();
      open_.get_future().wait();
    };
  }
  void wait_until_reached() { reached_.get_future().wait(); }
  void open() { open_.set_value(); }

 private:
  std::promise<void> reached_, open_;
};

TEST(ThreadEngine, RunsJobsInOrderOffTheCallersThread) {
  const auto engine = make_engine();
  std::vector<int> order;
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  const auto caller = std::this_thread::get_id();
  for (int i = 0; i < 100; ++i) {
    works.push_back(engine->submit(
        {},
        [&order, i, caller](Lane&) {
          EXPECT_NE(std::this_thread::get_id(), caller);
          order.push_back(i);
        },
        kNoJobTimeout));
  }
  for (auto work = works.rbegin(); work != works.rend(); ++work) (*work)->wait();
  ASSERT_EQ(order.size(), 100u);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(order[static_cast<size_t>(i)], i);
}

TEST(ThreadEngine, WhatAJobThrowsIsItsWorksAndTheNextJobRuns) {
  const auto engine = make_engine();
  const auto bad =
      engine->submit({}, [](Lane&) { throw std::runtime_error("bad"); }, kNoJobTimeout);
  const auto good = engine->submit({}, [](Lane&) {}, kNoJobTimeout);
  EXPECT_THROW(bad->wait(), std::runtime_error);
  EXPECT_TRUE(bad->exception());
  EXPECT_TRUE(good->wait());
  EXPECT_TRUE(good->isSuccess());
}

TEST(ThreadEngine, ResultIsTheTensorsThatWereSubmitted) {
  const auto engine = make_engine();
  const at::Tensor tensor = at::zeros({3});
  const auto work = engine->submit({tensor}, [tensor](Lane&) { tensor.fill_(2); }, kNoJobTimeout);
  work->wait();
  EXPECT_TRUE(work->result().front().is_same(tensor));
  work->getFuture()->waitAndThrow();
  EXPECT_TRUE(work->getFuture()->value().toTensorVector().front().is_same(tensor));
}

TEST(ThreadEngine, WaitTimesOut) {
  const auto engine = make_engine();
  Gate gate;
  const auto work = engine->submit({}, gate.job(), kNoJobTimeout);
  gate.wait_until_reached();
  EXPECT_FALSE(work->isCompleted());
  EXPECT_THROW(work->wait(std::chrono::milliseconds(10)), std::exception);
  gate.open();
}

TEST(ThreadEngine, ShutdownRunsWhatIsQueued) {
  const auto engine = make_engine();
  int ran = 0;
  for (int i = 0; i < 10; ++i) engine->submit({}, [&ran](Lane&) { ++ran; }, kNoJobTimeout);
  engine->shutdown();
  EXPECT_EQ(ran, 10);
  EXPECT_THROW(engine->submit({}, [](Lane&) {}, kNoJobTimeout), c10::Error);
  engine->shutdown();  // again: nothing
}

TEST(ThreadEngine, AbortFailsWhatIsQueuedAndDoesNotWaitForAStuckJob) {
  auto engine = make_engine();
  const auto gate = std::make_shared<Gate>();
  const auto stuck = engine->submit({}, [gate](Lane& lane) { gate->job()(lane); }, kNoJobTimeout);
  gate->wait_until_reached();
  const auto queued = engine->submit({}, [](Lane&) { FAIL() << "ran after abort"; }, kNoJobTimeout);
  const auto start = steady_clock::now();
  engine->abort();
  engine.reset();
  EXPECT_LT(steady_clock::now() - start, std::chrono::seconds(30));  // bounded, not fast
  EXPECT_THROW(queued->wait(), c10::Error);
  EXPECT_FALSE(stuck->isCompleted());
  gate->open();  // the worker that was left behind ends by itself
  EXPECT_TRUE(stuck->wait());
}

}  // namespace
}  // namespace powersgd
