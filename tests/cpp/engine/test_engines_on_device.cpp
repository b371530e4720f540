// SPDX-License-Identifier: BSD-3-Clause
//
// The engines on a device (support/fake_device.h) that runs what is enqueued in any order which
// streams and events admit: an order that is missing shows as a wrong sum.
#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "engine/stream_engine.h"
#include "engine/thread_engine.h"
#include "support/fake_device.h"
#include "support/two_equal_ranks.h"

namespace powersgd {
namespace {

namespace fake = test::fake_device;
using test::HostBackend;
using test::StreamBackend;
constexpr auto kNoJobTimeout = c10d::kUnsetTimeout;
constexpr unsigned kOrders = 200;

class StreamEngineTest : public testing::Test {
 protected:
  StreamEngineTest() { fake::reset(0, fake::Host::kMayNotWait); }

  c10::intrusive_ptr<StreamBackend> backend_ = c10::make_intrusive<StreamBackend>();
  StreamEngine engine_{0, backend_};
};

// A tensor, and a job in two parts that makes 4 x + 2 of x: through P, which is all of x + 0.5 and
// summed, and Q, which is P and summed.
class Step {
 public:
  explicit Step(c10::Device device, int64_t numel = 2)
      : device_(device),
        x_(static_cast<size_t>(numel), -1.0F),
        p_(static_cast<size_t>(numel), -1.0F),
        tensor_(fake::tensor(device, x_)),
        payload_(fake::tensor(device, p_)) {}

  void fill(float value) {
    fake::enqueue(device_, [this, value] { std::fill(x_.begin(), x_.end(), value); });
  }

  c10::intrusive_ptr<c10d::Work> submit(Engine& engine) {
    Job job;
    job.first = [this](Channel& channel) {
      fake::enqueue(device_, [this] {
        for (size_t i = 0; i < x_.size(); ++i) p_[i] = x_[i] + 0.5F;
      });
      channel.allreduce(payload_);
    };
    job.second = [this](Channel& channel) {
      channel.allreduce(payload_);
      fake::enqueue(device_, [this] { x_ = p_; });
    };
    return engine.submit({tensor_}, std::move(job), device_, kNoJobTimeout);
  }

  // What x is when the device comes to this point of the current stream.
  std::shared_ptr<float> read() {
    auto seen = std::make_shared<float>(-1.0F);
    fake::enqueue(device_, [this, seen] { *seen = x_.back(); });
    return seen;
  }

  const at::Tensor& tensor() const { return tensor_; }

 private:
  const c10::Device device_;
  std::vector<float> x_, p_;
  at::Tensor tensor_, payload_;
};

// body(engine), for an engine and an order of the device of its own each time.
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
    Step step(fake::device(0));
    fake::use_new_stream(fake::device(0));
    step.fill(1);
    const auto work = step.submit(engine);
    EXPECT_TRUE(work->wait());
    const auto seen = step.read();
    EXPECT_EQ(*seen, -1) << "something ran before the device was let go";
    EXPECT_FALSE(work->isCompleted());
    fake::run();
    EXPECT_EQ(*seen, 6);
    EXPECT_TRUE(work->isCompleted());
    EXPECT_TRUE(work->isSuccess());
  });
}

// The oracle can fail.
TEST_F(StreamEngineTest, WithoutAWaitSomeOrdersShow) {
  unsigned too_early = 0;
  in_many_orders([&](StreamEngine& engine) {
    Step step(fake::device(0));
    step.fill(1);
    const auto work = step.submit(engine);
    const auto seen = step.read();
    fake::run();
    too_early += *seen != 6;
  });
  EXPECT_GT(too_early, 0U);
}

TEST_F(StreamEngineTest, TheFutureOrdersTheStreamsOfItsUsers) {
  in_many_orders([&](StreamEngine& engine) {
    Step step(fake::device(0));
    step.fill(1);
    const auto future = step.submit(engine)->getFuture();
    std::shared_ptr<float> in_callback;
    future->addCallback([&](c10::ivalue::Future&) { in_callback = step.read(); });
    fake::use_new_stream(fake::device(0));
    future->wait();
    const auto seen = step.read();
    fake::run();
    EXPECT_EQ(*seen, 6);
    EXPECT_EQ(*in_callback, 6);
    EXPECT_TRUE(future->value().toTensorVector().front().is_same(step.tensor()));
  });
}

TEST_F(StreamEngineTest, AWaitOrdersTheStreamOfTheTensorsDeviceWhicheverIsCurrent) {
  in_many_orders([&](StreamEngine& engine) {
    Step step(fake::device(1));
    fake::use_new_stream(fake::device(1));
    fake::set_current_device(fake::device(0));
    step.fill(1);
    step.submit(engine)->wait();
    const auto seen = step.read();
    fake::run();
    EXPECT_EQ(*seen, 6);
  });
}

TEST_F(StreamEngineTest, JobsOfADeviceFollowEachOtherWhateverIsBetweenThem) {
  in_many_orders([&](StreamEngine& engine) {
    Step here(fake::device(0)), there(fake::device(1));
    here.fill(1);
    there.fill(3);
    here.submit(engine);
    there.submit(engine);
    here.submit(engine)->wait();  // on what the first made of it; nobody has waited for that
    const auto seen = here.read();
    fake::run();
    EXPECT_EQ(*seen, 4 * 6 + 2);
  });
}

TEST_F(StreamEngineTest, CollectivesRunInTheOrderInWhichTheyAreIssued) {
  Step one(fake::device(0), 1), two(fake::device(0), 2), three(fake::device(0), 3);
  one.submit(engine_);
  std::vector<at::Tensor> callers = {two.tensor()};
  backend_->allreduce(callers, {});  // passes by the engine
  three.submit(engine_);
  fake::run();
  EXPECT_EQ(backend_->ran, (std::vector<std::string>{"1", "1", "2", "3", "3"}));
}

TEST_F(StreamEngineTest, TheAllocatorIsToldWhichStreamUsesTheMemory) {
  Step step(fake::device(1));
  step.submit(engine_);
  step.submit(engine_);
  std::vector<c10::Stream> streams;
  for (const auto& [memory, stream] : fake::recorded_uses()) {
    if (memory == step.tensor().data_ptr()) streams.push_back(stream);
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
  Step step(fake::device(1));
  step.submit(engine_)->wait();
  EXPECT_EQ(impl.getDevice(), fake::device(0));
  EXPECT_EQ(impl.getStream(fake::device(1)), callers);
}

TEST_F(StreamEngineTest, WhatAJobThrowsIsItsWorksAndTheNextJobRuns) {
  Step step(fake::device(0));
  step.fill(1);
  backend_->fails = true;
  const auto bad = step.submit(engine_);
  backend_->fails = false;
  EXPECT_THROW(bad->wait(), c10::Error);
  EXPECT_TRUE(bad->isCompleted());
  EXPECT_FALSE(bad->isSuccess());
  EXPECT_TRUE(bad->exception());
  EXPECT_TRUE(bad->getFuture()->hasError());
  step.submit(engine_)->wait();
  const auto seen = step.read();
  fake::run();
  EXPECT_EQ(*seen, 6);
}

TEST_F(StreamEngineTest, TakesNoJobOnceItIsClosed) {
  Step step(fake::device(0));
  engine_.shutdown();
  EXPECT_THROW(step.submit(engine_), c10::Error);
  StreamEngine aborted(0, backend_);
  aborted.abort();
  EXPECT_THROW(step.submit(aborted), c10::Error);
}

TEST(ThreadEngineOnDevice, AJobFollowsTheCallersStreamAndIsDoneWhenWaitReturns) {
  ThreadEngine engine(0, {c10::make_intrusive<HostBackend>(), c10::make_intrusive<HostBackend>()});
  for (unsigned seed = 0; seed < kOrders; ++seed) {
    fake::reset(seed, fake::Host::kMayWait);
    Step here(fake::device(0)), there(fake::device(1));
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
