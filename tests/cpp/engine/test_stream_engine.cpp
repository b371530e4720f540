// SPDX-License-Identifier: BSD-3-Clause
//
// The engine on a device (fake_device/fake_device.h) that runs enqueued operations in any order
// that streams and events admit. An order that the engine fails to set shows as a wrong number.
#include "engine/stream_engine.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "engine/affine_job.h"
#include "fake_device/fake_device.h"
#include "ranks/two_equal_ranks.h"

namespace powersgd {
namespace {

namespace fake = test::fake_device;
using test::AffineJob;
using test::StreamBackend;
constexpr auto kNoJobTimeout = c10d::kUnsetTimeout;
constexpr unsigned kOrders = 200;

class StreamEngineTest : public testing::Test {
 protected:
  StreamEngineTest() { fake::reset(0, fake::Host::kMayNotWait); }

  c10::intrusive_ptr<StreamBackend> backend_ = c10::make_intrusive<StreamBackend>();
  StreamEngine engine_{0, backend_};
};

// Calls body(engine) with a new engine for each of many orders in which the device may run.
template <class Body>
void in_many_orders(const Body& body) {
  for (unsigned seed = 0; seed < kOrders; ++seed) {
    fake::reset(seed, fake::Host::kMayNotWait);
    StreamEngine engine(0, c10::make_intrusive<StreamBackend>());
    body(engine);
  }
}

TEST_F(StreamEngineTest, AWaitOrdersTheStreamAndDoesNotBlockTheHost) {
  in_many_orders([&](StreamEngine& engine) {
    AffineJob job(fake::device(0));
    fake::use_new_stream(fake::device(0));
    job.fill(1);
    const auto work = job.submit(engine);
    EXPECT_TRUE(work->wait());
    const auto seen = job.read();
    EXPECT_EQ(*seen, -1) << "something ran before the device was let go";
    EXPECT_FALSE(work->isCompleted());
    fake::run();
    EXPECT_EQ(*seen, 6);
    EXPECT_TRUE(work->isCompleted());
    EXPECT_TRUE(work->isSuccess());
  });
}

// The tests here can fail.
TEST_F(StreamEngineTest, WithoutAWaitSomeOrdersShow) {
  unsigned too_early = 0;
  in_many_orders([&](StreamEngine& engine) {
    AffineJob job(fake::device(0));
    job.fill(1);
    const auto work = job.submit(engine);
    const auto seen = job.read();
    fake::run();
    too_early += *seen != 6;
  });
  EXPECT_GT(too_early, 0U);
}

TEST_F(StreamEngineTest, TheFutureOrdersTheStreamsOfItsUsers) {
  in_many_orders([&](StreamEngine& engine) {
    AffineJob job(fake::device(0));
    job.fill(1);
    const auto future = job.submit(engine)->getFuture();
    std::shared_ptr<float> in_callback;
    future->addCallback([&](c10::ivalue::Future&) { in_callback = job.read(); });
    fake::use_new_stream(fake::device(0));
    future->wait();
    const auto seen = job.read();
    fake::run();
    EXPECT_EQ(*seen, 6);
    EXPECT_EQ(*in_callback, 6);
    EXPECT_TRUE(future->value().toTensorVector().front().is_same(job.tensor()));
  });
}

TEST_F(StreamEngineTest, AWaitOrdersTheStreamOfTheTensorsDeviceWhicheverIsCurrent) {
  in_many_orders([&](StreamEngine& engine) {
    AffineJob job(fake::device(1));
    fake::use_new_stream(fake::device(1));
    fake::set_current_device(fake::device(0));
    job.fill(1);
    job.submit(engine)->wait();
    const auto seen = job.read();
    fake::run();
    EXPECT_EQ(*seen, 6);
  });
}

TEST_F(StreamEngineTest, JobsOfADeviceFollowEachOtherWhateverIsBetweenThem) {
  in_many_orders([&](StreamEngine& engine) {
    AffineJob here(fake::device(0)), there(fake::device(1));
    here.fill(1);
    there.fill(3);
    here.submit(engine);
    there.submit(engine);
    here.submit(engine)->wait();  // nobody has waited for the first
    const auto seen = here.read();
    fake::run();
    EXPECT_EQ(*seen, 4 * 6 + 2);
  });
}

TEST_F(StreamEngineTest, CollectivesRunInTheOrderInWhichTheyAreIssued) {
  AffineJob one(fake::device(0), 1), two(fake::device(0), 2), three(fake::device(0), 3);
  one.submit(engine_);
  std::vector<at::Tensor> callers = {two.tensor()};
  backend_->allreduce(callers, {});  // not through the engine
  three.submit(engine_);
  fake::run();
  EXPECT_EQ(backend_->ran, (std::vector<std::string>{"1", "1", "2", "3", "3"}));
}

TEST_F(StreamEngineTest, TheAllocatorKnowsTheStreamThatUsesTheMemory) {
  AffineJob job(fake::device(1));
  job.submit(engine_);
  job.submit(engine_);
  std::vector<c10::Stream> streams;
  for (const auto& [memory, stream] : fake::recorded_uses()) {
    if (memory == job.tensor().data_ptr()) streams.push_back(stream);
  }
  ASSERT_EQ(streams.size(), 2U);
  for (const c10::Stream& stream : streams) {
    EXPECT_EQ(stream, streams[0]);
    EXPECT_NE(stream.id(), 0);
    EXPECT_EQ(stream.device(), fake::device(1));
  }
}

TEST_F(StreamEngineTest, MemoryThatIsReleasedAtOnceStaysUntilTheJobHasReadIt) {
  fake::add_operators();
  const c10::Device device = fake::device(0);
  in_many_orders([&](StreamEngine& engine) {
    std::vector<float> copied(1000, -1.0F);
    const at::Tensor copy = fake::tensor(device, copied);
    {
      const at::Tensor tensor = at::ones({1000}, device);
      Job job;
      job.second = [&tensor, &copy](Channel&) { copy.copy_(tensor); };
      engine.submit({tensor}, std::move(job), device, kNoJobTimeout);
    }
    fake::run();
    EXPECT_EQ(copied, std::vector<float>(1000, 1.0F));
  });
}

TEST_F(StreamEngineTest, DeviceAndStreamAreTheCallersAgain) {
  const c10::impl::VirtualGuardImpl impl(fake::device(0).type());
  const c10::Stream callers = fake::use_new_stream(fake::device(1));
  AffineJob job(fake::device(1));
  job.submit(engine_)->wait();
  EXPECT_EQ(impl.getDevice(), fake::device(0));
  EXPECT_EQ(impl.getStream(fake::device(1)), callers);
}

TEST_F(StreamEngineTest, WhatAJobThrowsIsItsWorksAndTheNextJobRuns) {
  AffineJob job(fake::device(0));
  job.fill(1);
  backend_->fails = true;
  const auto bad = job.submit(engine_);
  backend_->fails = false;
  EXPECT_THROW(bad->wait(), c10::Error);
  EXPECT_TRUE(bad->isCompleted());
  EXPECT_FALSE(bad->isSuccess());
  EXPECT_TRUE(bad->exception());
  EXPECT_TRUE(bad->getFuture()->hasError());
  job.submit(engine_)->wait();
  const auto seen = job.read();
  fake::run();
  EXPECT_EQ(*seen, 6);
}

TEST_F(StreamEngineTest, TakesNoJobOnceItIsClosed) {
  AffineJob job(fake::device(0));
  engine_.shutdown();
  EXPECT_THROW(job.submit(engine_), c10::Error);
  StreamEngine aborted(0, backend_);
  aborted.abort();
  EXPECT_THROW(job.submit(aborted), c10::Error);
}

TEST_F(StreamEngineTest, AfterAFailureInTheFirstPartTheSecondIsNotRun) {
  Job job;
  job.first = [](Channel&) { throw std::runtime_error("bad"); };
  job.second = [](Channel&) { FAIL() << "ran after a failure"; };
  const auto work = engine_.submit({}, std::move(job), fake::device(0), kNoJobTimeout);
  EXPECT_THROW(work->wait(), std::runtime_error);
}

TEST_F(StreamEngineTest, AutogradDoesNotRecordAJob) {
  std::vector<bool> recorded;
  Job job;
  job.first = [&](Channel&) { recorded.push_back(at::GradMode::is_enabled()); };
  job.second = job.first;
  ASSERT_TRUE(at::GradMode::is_enabled());
  engine_.submit({}, std::move(job), fake::device(0), kNoJobTimeout);
  EXPECT_EQ(recorded, (std::vector<bool>{false, false}));
  EXPECT_TRUE(at::GradMode::is_enabled());
}

// Collectives of two jobs on one communicator must come in the same order on all ranks.
TEST_F(StreamEngineTest, JobsOfTwoThreadsAreEnqueuedOneAfterTheOther) {
  std::promise<void> first_begun, second_begun;
  const auto of_second = second_begun.get_future();
  std::future_status beside = std::future_status::ready;
  Job one, other;
  one.second = [&](Channel&) {
    first_begun.set_value();
    beside = of_second.wait_for(std::chrono::milliseconds(50));  // time enough to begin
  };
  other.second = [&](Channel&) { second_begun.set_value(); };
  std::thread submitter(
      [&] { engine_.submit({}, std::move(one), fake::device(0), kNoJobTimeout); });
  first_begun.get_future().wait();
  engine_.submit({}, std::move(other), fake::device(0), kNoJobTimeout);
  submitter.join();
  EXPECT_EQ(beside, std::future_status::timeout);
}

// Completes nothing and keeps the time-out of the last collective.
class TimeoutBackend : public c10d::Backend {
 public:
  TimeoutBackend() : Backend(0, 2) {}

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& /*tensors*/,
                                           const c10d::AllreduceOptions& options) override {
    timeout = options.timeout;
    return nullptr;
  }

  std::chrono::milliseconds timeout{};
};

TEST_F(StreamEngineTest, AJobsCollectivesHaveItsTimeout) {
  const auto backend = c10::make_intrusive<TimeoutBackend>();
  StreamEngine engine(0, backend);
  for (const std::chrono::milliseconds timeout : {std::chrono::milliseconds(77), kNoJobTimeout}) {
    Job job;
    job.second = [](Channel& channel) {
      at::Tensor payload = at::zeros({1});
      channel.allreduce(payload);
    };
    engine.submit({}, std::move(job), fake::device(0), timeout);
    EXPECT_EQ(backend->timeout, timeout);
  }
}

}  // namespace
}  // namespace powersgd
