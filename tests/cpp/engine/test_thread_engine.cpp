// SPDX-License-Identifier: BSD-3-Clause
#include "engine/thread_engine.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <memory>
#include <thread>
#include <vector>

#include "engine/affine_job.h"
#include "engine/jobs.h"
#include "fake_device/fake_device.h"
#include "ranks/ready_channels.h"
#include "ranks/two_equal_ranks.h"

namespace powersgd {
namespace {

using test::Gate;
using test::job_of;
using test::kShort;
using test::submit;

class ThreadEngineTest : public testing::Test {
 protected:
  ThreadEngine engine_{0, test::channels_of_one(), Grace{std::chrono::seconds(10), kShort.abort}};
};

TEST_F(ThreadEngineTest, RunsJobsInOrderOffTheCallersThread) {
  std::vector<int> order;
  std::vector<test::WorkPtr> works;
  const auto caller = std::this_thread::get_id();
  for (int i = 0; i < 100; ++i) {
    works.push_back(submit(engine_, job_of([&order, i, caller](Channel&) {
                             EXPECT_NE(std::this_thread::get_id(), caller);
                             order.push_back(i);
                           })));
  }
  for (auto work = works.rbegin(); work != works.rend(); ++work) (*work)->wait();
  ASSERT_EQ(order.size(), 100u);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(order[static_cast<size_t>(i)], i);
}

TEST_F(ThreadEngineTest, ShutdownRunsWhatIsQueued) {
  int ran = 0;
  for (int i = 0; i < 10; ++i) submit(engine_, job_of([&ran](Channel&) { ++ran; }));
  engine_.shutdown();
  EXPECT_EQ(ran, 10);
}

TEST_F(ThreadEngineTest, AbortEndsAJobBetweenItsParts) {
  const Gate gate;
  const auto work =
      submit(engine_, job_of(gate.part(), [](Channel&) { FAIL() << "ran after abort"; }));
  gate.wait_until_reached();
  engine_.abort();  // leaves the worker behind
  EXPECT_FALSE(work->isCompleted());
  gate.open();
  EXPECT_THROW(work->wait(), c10::Error);
}

// The pipeline.

// Returns true if one job begins while another is held in its second part.
bool begins_beside(Job one, Job other) {
  ThreadEngine engine(0, test::channels_of_one());
  const Gate gate;
  std::promise<void> begun;
  auto seen = begun.get_future();
  one.second = gate.part();
  other.first = [&](Channel&) { begun.set_value(); };
  other.second = [](Channel&) {};
  const auto first = submit(engine, std::move(one)), second = submit(engine, std::move(other));
  gate.wait_until_reached();
  // A job that must not begin is given the time to.
  const bool beside = seen.wait_for(std::chrono::milliseconds(50)) == std::future_status::ready;
  EXPECT_FALSE(second->isCompleted()) << "jobs end in the order of submission";
  gate.open();
  first->wait();
  second->wait();
  return beside;
}

TEST(ThreadPipeline, TheNextJobBeginsWhileOneIsInItsSecondPart) {
  bool beside = false;  // a machine under load may need more than one attempt
  for (int attempt = 0; attempt < 100 && !beside; ++attempt) beside = begins_beside({}, {});
  EXPECT_TRUE(beside);
}

TEST(ThreadPipeline, JobsThatShareAStateDoNotOverlap) {
  const int shared = 0, own = 0;
  Job one, other;
  one.changes = {&shared};
  other.changes = {&own, &shared};
  EXPECT_FALSE(begins_beside(one, other));
}

TEST(ThreadPipeline, AJobAloneDoesNotOverlap) {
  Job alone;
  alone.alone = true;
  EXPECT_FALSE(begins_beside(alone, {}));
  EXPECT_FALSE(begins_beside({}, alone));
}

// The worker threads.

TEST_F(ThreadEngineTest, AJobHasTheThreadCountOfItsSubmitter) {
  const int before = at::get_num_threads();
  for (const int wanted : {3, 2}) {
    at::set_num_threads(wanted);
    std::vector<int> counts;
    const auto part = [&](Channel&) { counts.push_back(at::get_num_threads()); };
    submit(engine_, job_of(part, part))->wait();
    EXPECT_EQ(counts, (std::vector<int>{wanted, wanted}));
  }
  at::set_num_threads(before);
}

// A device whose inner backend blocks the host.
TEST(ThreadEngineOnDevice, AJobFollowsTheCallersStreamAndIsDoneWhenWaitReturns) {
  namespace fake = test::fake_device;
  const auto backend = c10::make_intrusive<test::HostBackend>();
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
