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
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "engine/stream_pipeline.h"

namespace powersgd {
namespace {

namespace fake = test::fake_device;
using test::AffineJob;
using test::Group;
using test::in_many_orders;
using test::job_of;

// In the first order.
class StreamEngineTest : public testing::Test {
 protected:
  StreamEngineTest() { fake::reset(0, fake::Host::kMayNotWait); }

  Group group_;
};

TEST(StreamEngine, AWaitOrdersTheStreamAndDoesNotBlockTheHost) {
  in_many_orders([](Group& group) {
    AffineJob job(fake::device(0));
    fake::use_new_stream(fake::device(0));
    job.fill(1);
    const auto work = job.submit(group.engine);
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
TEST(StreamEngine, WithoutAWaitSomeOrdersShow) {
  unsigned too_early = 0;
  in_many_orders([&](Group& group) {
    AffineJob job(fake::device(0));
    job.fill(1);
    const auto work = job.submit(group.engine);
    const auto seen = job.read();
    fake::run();
    too_early += *seen != 6;
  });
  EXPECT_GT(too_early, 0U);
}

TEST(StreamEngine, TheFutureOrdersTheStreamsOfItsUsers) {
  in_many_orders([](Group& group) {
    AffineJob job(fake::device(0));
    job.fill(1);
    const auto future = job.submit(group.engine)->getFuture();
    std::shared_ptr<float> in_callback;
    future->addCallback([&](c10::ivalue::Future&) { in_callback = job.read(); });
    fake::use_new_stream(fake::device(0));
    future->wait();
    job.expect(6);
    EXPECT_EQ(*in_callback, 6);
    EXPECT_TRUE(future->value().toTensorVector().front().is_same(job.tensor()));
  });
}

TEST(StreamEngine, AWaitOrdersTheStreamOfTheTensorsDeviceWhicheverIsCurrent) {
  in_many_orders([](Group& group) {
    AffineJob job(fake::device(1));
    fake::use_new_stream(fake::device(1));
    fake::set_current_device(fake::device(0));
    job.fill(1);
    job.submit(group.engine)->wait();
    job.expect(6);
  });
}

TEST(StreamEngine, JobsOfADeviceFollowEachOtherWhateverIsBetweenThem) {
  in_many_orders([](Group& group) {
    AffineJob here(fake::device(0)), there(fake::device(1));
    here.fill(1);
    there.fill(3);
    here.submit(group.engine);
    there.submit(group.engine);
    here.submit(group.engine)->wait();  // nobody has waited for the first
    here.expect(4 * 6 + 2);
  });
}

TEST_F(StreamEngineTest, CollectivesRunInTheOrderInWhichTheyAreIssued) {
  AffineJob one(fake::device(0), 1), two(fake::device(0), 2), three(fake::device(0), 3);
  one.submit(group_.engine);
  std::vector<at::Tensor> callers = {two.tensor()};
  group_.backend->allreduce(callers, {});  // not through the engine
  three.submit(group_.engine);
  fake::run();
  EXPECT_EQ(group_.backend->ran, (std::vector<std::string>{"1", "1", "2", "3", "3"}));
}

TEST_F(StreamEngineTest, DeviceAndStreamAreTheCallersAgain) {
  const c10::impl::VirtualGuardImpl impl(fake::device(0).type());
  const c10::Stream callers = fake::use_new_stream(fake::device(1));
  AffineJob job(fake::device(1));
  job.submit(group_.engine)->wait();
  EXPECT_EQ(impl.getDevice(), fake::device(0));
  EXPECT_EQ(impl.getStream(fake::device(1)), callers);
}

// Collectives of two jobs on one communicator must come in the same order on all ranks.
TEST_F(StreamEngineTest, JobsOfTwoThreadsAreEnqueuedOneAfterTheOther) {
  std::promise<void> first_begun, second_begun;
  const auto of_second = second_begun.get_future();
  std::future_status beside = std::future_status::ready;
  std::thread submitter([&] {
    group_.submit(job_of([&](Channel&) {
      first_begun.set_value();
      beside = of_second.wait_for(std::chrono::milliseconds(50));  // time enough to begin
    }));
  });
  first_begun.get_future().wait();
  group_.submit(job_of([&](Channel&) { second_begun.set_value(); }));
  submitter.join();
  EXPECT_EQ(beside, std::future_status::timeout);
}

// Completes nothing and keeps the options of the last collective.
class OptionsBackend : public c10d::Backend {
 public:
  OptionsBackend() : Backend(0, 2) {}

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& /*tensors*/,
                                           const c10d::AllreduceOptions& options) override {
    last = options;
    return nullptr;
  }

  std::optional<c10d::AllreduceOptions> last;
};

TEST_F(StreamEngineTest, CollectivesHaveTheJobsTimeoutAndRunOnTheSideStreamsThemselves) {
  const auto backend = c10::make_intrusive<OptionsBackend>();
  StreamEngine engine(0, backend);
  for (const auto timeout : {std::chrono::milliseconds(77), c10d::kUnsetTimeout}) {
    const auto sum = [](Channel& channel) {
      at::Tensor payload = at::zeros({1});
      channel.allreduce(payload);
    };
    engine.submit({}, job_of(sum), fake::device(0), timeout);
    ASSERT_TRUE(backend->last);
    EXPECT_EQ(backend->last->timeout, timeout);
    EXPECT_FALSE(backend->last->asyncOp);
  }
}

}  // namespace
}  // namespace powersgd
