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
#include "ranks/connected.h"
#include "ranks/two_equal_ranks.h"

namespace powersgd {
namespace {

using test::Gate;
using test::job_of;
using test::kNeverReached;
using test::kShort;
using test::submit;

class ThreadEngineTest : public testing::Test {
 protected:
  ThreadEngine engine_{0, test::connection_of_one(), Grace{kNeverReached, kShort.abort}};
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

// The worker thread.

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
  ThreadEngine engine(0, std::make_shared<Connection>(test::connected(backend)));
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
