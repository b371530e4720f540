// SPDX-License-Identifier: BSD-3-Clause
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "engine/affine_job.h"
#include "engine/thread_engine.h"
#include "fake_device/fake_device.h"
#include "ranks/thread_ranks.h"
#include "ranks/two_equal_ranks.h"

namespace powersgd {
namespace {

using std::chrono::steady_clock;
constexpr auto kNoJobTimeout = c10d::kUnsetTimeout;

std::unique_ptr<ThreadEngine> make_engine() {
  return std::make_unique<ThreadEngine>(0, std::make_shared<Channels>(test::Channels(1).of(0)));
}

Job second_part(std::function<void(Channel&)> body) { return {{}, std::move(body), {}, false}; }

// Keeps a worker busy until it opens.
class Gate {
 public:
  std::function<void(Channel&)> part() {
    return [this](Channel&) {
      reached_.set_value();
      open_.get_future().wait();
    };
  }
  Job job() { return second_part(part()); }
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
    works.push_back(engine->submit({}, second_part([&order, i, caller](Channel&) {
                                     EXPECT_NE(std::this_thread::get_id(), caller);
                                     order.push_back(i);
                                   }),
                                   at::kCPU, kNoJobTimeout));
  }
  for (auto work = works.rbegin(); work != works.rend(); ++work) (*work)->wait();
  ASSERT_EQ(order.size(), 100u);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(order[static_cast<size_t>(i)], i);
}

TEST(ThreadEngine, WhatAJobThrowsIsItsWorksAndTheNextJobRuns) {
  const auto engine = make_engine();
  const auto bad = engine->submit(
      {}, second_part([](Channel&) { throw std::runtime_error("bad"); }), at::kCPU, kNoJobTimeout);
  const auto good = engine->submit({}, second_part([](Channel&) {}), at::kCPU, kNoJobTimeout);
  EXPECT_THROW(bad->wait(), std::runtime_error);
  EXPECT_TRUE(bad->exception());
  EXPECT_TRUE(good->wait());
  EXPECT_TRUE(good->isSuccess());
}

TEST(ThreadEngine, ResultIsTheTensorsThatWereSubmitted) {
  const auto engine = make_engine();
  const at::Tensor tensor = at::zeros({3});
  const auto work = engine->submit({tensor}, second_part([tensor](Channel&) { tensor.fill_(2); }),
                                   at::kCPU, kNoJobTimeout);
  work->wait();
  EXPECT_TRUE(work->result().front().is_same(tensor));
  work->getFuture()->waitAndThrow();
  EXPECT_TRUE(work->getFuture()->value().toTensorVector().front().is_same(tensor));
}

TEST(ThreadEngine, WaitTimesOut) {
  const auto engine = make_engine();
  Gate gate;
  const auto work = engine->submit({}, gate.job(), at::kCPU, kNoJobTimeout);
  gate.wait_until_reached();
  EXPECT_FALSE(work->isCompleted());
  EXPECT_THROW(work->wait(std::chrono::milliseconds(10)), std::exception);
  gate.open();
}

TEST(ThreadEngine, ShutdownRunsWhatIsQueued) {
  const auto engine = make_engine();
  int ran = 0;
  for (int i = 0; i < 10; ++i)
    engine->submit({}, second_part([&ran](Channel&) { ++ran; }), at::kCPU, kNoJobTimeout);
  engine->shutdown();
  EXPECT_EQ(ran, 10);
  EXPECT_THROW(engine->submit({}, second_part([](Channel&) {}), at::kCPU, kNoJobTimeout),
               c10::Error);
  engine->shutdown();  // a second one does nothing
}

TEST(ThreadEngine, AbortFailsWhatIsQueuedAndDoesNotWaitForAStuckJob) {
  auto engine = make_engine();
  const auto gate = std::make_shared<Gate>();
  const auto stuck =
      engine->submit({}, second_part([gate](Channel& channel) { gate->part()(channel); }), at::kCPU,
                     kNoJobTimeout);
  gate->wait_until_reached();
  const auto queued = engine->submit({}, second_part([](Channel&) { FAIL() << "ran after abort"; }),
                                     at::kCPU, kNoJobTimeout);
  const auto start = steady_clock::now();
  engine->abort();
  engine.reset();
  EXPECT_LT(steady_clock::now() - start, std::chrono::seconds(30));  // bounded, not fast
  EXPECT_THROW(queued->wait(), c10::Error);
  EXPECT_FALSE(stuck->isCompleted());
  gate->open();  // the worker that was left behind ends by itself
  EXPECT_TRUE(stuck->wait());
}

// The pipeline.

// Returns true if one job begins while another is held in its second part.
bool begins_beside(Job one, Job other) {
  const auto engine = make_engine();
  Gate gate;
  std::promise<void> begun;
  auto seen = begun.get_future();
  one.second = gate.part();
  other.first = [&](Channel&) { begun.set_value(); };
  other.second = [](Channel&) {};
  const auto first = engine->submit({}, std::move(one), at::kCPU, kNoJobTimeout);
  const auto second = engine->submit({}, std::move(other), at::kCPU, kNoJobTimeout);
  gate.wait_until_reached();
  // A job that must not begin is given the time to.
  const auto limit = std::chrono::milliseconds(50);
  bool beside = seen.wait_for(limit) == std::future_status::ready;
  EXPECT_FALSE(second->isCompleted()) << "jobs end in the order of submission";
  gate.open();
  first->wait();
  second->wait();
  return beside;
}

TEST(ThreadEngine, TheNextJobBeginsWhileOneIsInItsSecondPart) {
  bool beside = false;  // a machine under load may need more than one attempt
  for (int attempt = 0; attempt < 100 && !beside; ++attempt) beside = begins_beside({}, {});
  EXPECT_TRUE(beside);
}

TEST(ThreadEngine, JobsThatShareAStateDoNotOverlap) {
  const int shared = 0, own = 0;
  Job one, other;
  one.changes = {&shared};
  other.changes = {&own, &shared};
  EXPECT_FALSE(begins_beside(one, other));
}

TEST(ThreadEngine, AJobAloneDoesNotOverlap) {
  Job alone;
  alone.alone = true;
  EXPECT_FALSE(begins_beside(alone, {}));
  EXPECT_FALSE(begins_beside({}, alone));
}

TEST(ThreadEngine, EachPartHasItsChannel) {
  const test::Channels channels(1);
  ThreadEngine engine(0, std::make_shared<Channels>(channels.of(0)));
  at::Tensor p = at::ones({3}), q = at::ones({5});
  Job job;
  job.first = [&](Channel& channel) { channel.allreduce(p); };
  job.second = [&](Channel& channel) { channel.allreduce(q); };
  engine.submit({}, std::move(job), at::kCPU, kNoJobTimeout)->wait();
  ASSERT_EQ(channels.p(0).calls().size(), 1u);
  ASSERT_EQ(channels.q(0).calls().size(), 1u);
  EXPECT_EQ(channels.p(0).calls()[0].numel, 3);
  EXPECT_EQ(channels.q(0).calls()[0].numel, 5);
}

TEST(ThreadEngine, AfterAFailureInTheFirstPartTheSecondIsNotRun) {
  const auto engine = make_engine();
  Job job;
  job.first = [](Channel&) { throw std::runtime_error("bad"); };
  job.second = [](Channel&) { FAIL() << "ran after a failure"; };
  const auto bad = engine->submit({}, std::move(job), at::kCPU, kNoJobTimeout);
  const auto good = engine->submit({}, second_part([](Channel&) {}), at::kCPU, kNoJobTimeout);
  EXPECT_THROW(bad->wait(), std::runtime_error);
  EXPECT_TRUE(good->wait());
}

TEST(ThreadEngine, AbortEndsAJobBetweenItsParts) {
  const auto engine = make_engine();
  Gate gate;
  Job job;
  job.first = gate.part();
  job.second = [](Channel&) { FAIL() << "ran after abort"; };
  const auto work = engine->submit({}, std::move(job), at::kCPU, kNoJobTimeout);
  gate.wait_until_reached();
  engine->abort();  // leaves the worker behind
  EXPECT_FALSE(work->isCompleted());
  gate.open();
  EXPECT_THROW(work->wait(), c10::Error);
}

// The worker threads.

TEST(ThreadEngine, AutogradDoesNotRecordAJob) {
  const auto engine = make_engine();
  std::vector<bool> recorded;
  Job job;
  job.first = [&](Channel&) { recorded.push_back(at::GradMode::is_enabled()); };
  job.second = job.first;
  engine->submit({}, std::move(job), at::kCPU, kNoJobTimeout)->wait();
  EXPECT_EQ(recorded, (std::vector<bool>{false, false}));
}

TEST(ThreadEngine, AJobHasTheThreadCountOfItsSubmitter) {
  const auto engine = make_engine();
  const int before = at::get_num_threads();
  for (const int wanted : {3, 2}) {
    at::set_num_threads(wanted);
    std::vector<int> counts;
    Job job;
    job.first = [&](Channel&) { counts.push_back(at::get_num_threads()); };
    job.second = job.first;
    engine->submit({}, std::move(job), at::kCPU, kNoJobTimeout)->wait();
    EXPECT_EQ(counts, (std::vector<int>{wanted, wanted}));
  }
  at::set_num_threads(before);
}

// A device whose inner backend blocks the host.

TEST(ThreadEngine, AJobFollowsTheCallersStreamAndIsDoneWhenWaitReturns) {
  namespace fake = test::fake_device;
  using test::HostBackend;
  const auto backend = c10::make_intrusive<HostBackend>();
  ThreadEngine engine(0, std::make_shared<Channels>(test::ready_channels(backend, backend)));
  for (unsigned seed = 0; seed < 200; ++seed) {
    fake::reset(seed, fake::Host::kMayWait);
    test::AffineJob here(fake::device(0)), there(fake::device(1));
    fake::use_new_stream(fake::device(0));
    fake::use_new_stream(fake::device(1));
    here.fill(1);
    there.fill(3);
    const auto first = here.submit(engine);
    const auto second = there.submit(engine);
    EXPECT_TRUE(second->wait());
    EXPECT_TRUE(first->wait());
    const auto at_one = here.read(), at_three = there.read();
    for (const auto& work : {first, second}) work->getFuture()->waitAndThrow();
    fake::run();
    EXPECT_EQ(*at_one, 6);
    EXPECT_EQ(*at_three, 14);
  }
}

}  // namespace
}  // namespace powersgd
