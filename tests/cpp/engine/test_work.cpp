// SPDX-License-Identifier: BSD-3-Clause
#include "engine/work.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>
#include <pthread.h>

#include <chrono>
#include <future>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "engine/jobs.h"
#include "fake_device/fake_device.h"
#include "support/backward.h"
#include "support/errors.h"

namespace powersgd {
namespace {

namespace fake = test::fake_device;
using test::contains;
using test::error_of;
using test::in_backward;
using test::kNeverReached;
using ThreadWorkPtr = c10::intrusive_ptr<WorkPowerSGD>;

ThreadWorkPtr make_work(std::vector<at::Tensor> tensors = {}) {
  return c10::make_intrusive<WorkPowerSGD>(0, std::move(tensors));
}

std::exception_ptr error(const char* message) {
  return std::make_exception_ptr(std::runtime_error(message));
}

// WorkPowerSGD.

TEST(WorkPowerSGD, HasItsTensorsOnceItIsComplete) {
  const at::Tensor tensor = at::zeros({2});
  const ThreadWorkPtr work = make_work({tensor});
  EXPECT_FALSE(work->isCompleted());
  EXPECT_FALSE(work->getFuture()->completed());
  EXPECT_TRUE(contains(error_of([&] { work->result(); }), "needs to be completed"));
  EXPECT_THROW(work->wait(std::chrono::milliseconds(10)), std::exception);
  work->complete();
  EXPECT_TRUE(work->isCompleted());
  EXPECT_TRUE(work->isSuccess());
  EXPECT_TRUE(work->wait());
  EXPECT_TRUE(work->result().front().is_same(tensor));
  work->getFuture()->waitAndThrow();
  EXPECT_TRUE(work->getFuture()->value().toTensorVector().front().is_same(tensor));
}

TEST(WorkPowerSGD, ACallbackMayWaitForALaterWorkOfTheSameThread) {
  const ThreadWorkPtr first = make_work(), second = make_work();
  std::promise<std::string> seen;
  first->getFuture()->addCallback([&](c10::ivalue::Future&) {
    seen.set_value(error_of([&] { second->wait(kNeverReached); }));
  });
  first->complete();
  second->complete();
  EXPECT_EQ(seen.get_future().get(), "no error");
}

// StreamWork.

// Enqueues `operation` on a new stream of device 0, and returns the Work that ends with it.
c10::intrusive_ptr<StreamWork> enqueue_on_side_stream(std::function<void()> operation,
                                                      std::vector<at::Tensor> tensors = {}) {
  const c10::Device device = fake::device(0);
  const c10::impl::VirtualGuardImpl impl(device.type());
  const c10::StreamGuard guard(impl.getStreamFromGlobalPool(device));
  fake::enqueue(device, std::move(operation));
  c10::Event done(device.type());
  done.record(impl.getStream(device));
  return c10::make_intrusive<StreamWork>(0, std::move(tensors), std::move(done), nullptr);
}

class StreamWorkTest : public testing::Test {
 protected:
  StreamWorkTest() { fake::reset(0, fake::Host::kMayNotWait); }
};

TEST_F(StreamWorkTest, IsCompleteOnceTheDeviceIs) {
  const at::Tensor tensor = at::zeros({2});
  const auto work = enqueue_on_side_stream([] {}, {tensor});
  EXPECT_FALSE(work->isCompleted());
  EXPECT_TRUE(work->isSuccess());
  EXPECT_TRUE(work->result().front().is_same(tensor));  // in the order of the stream
  fake::run();
  EXPECT_TRUE(work->isCompleted());
}

TEST_F(StreamWorkTest, AnErrorCompletesItAtOnce) {
  c10::Event never(fake::device(0).type());
  const auto work =
      c10::make_intrusive<StreamWork>(0, std::vector<at::Tensor>{}, std::move(never), error("bad"));
  EXPECT_TRUE(work->isCompleted());
  EXPECT_FALSE(work->isSuccess());
  EXPECT_EQ(error_of([&] { work->wait(); }), "bad");
  EXPECT_EQ(error_of([&] { work->getFuture()->waitAndThrow(); }), "bad");
}

// A profiler.

int spans_begun, spans_ended;

bool is_allreduce(const at::RecordFunction& span) {
  return std::string(span.name()) == "powersgd:all_reduce";
}

std::unique_ptr<at::ObserverContext> count_begin(const at::RecordFunction& span) {
  spans_begun += is_allreduce(span);
  return nullptr;
}

void count_end(const at::RecordFunction& span, at::ObserverContext* /*context*/) {
  spans_ended += is_allreduce(span);
}

template <class Body>
void count_spans(const Body& body) {
  spans_begun = spans_ended = 0;
  const auto callback = at::addThreadLocalCallback(
      at::RecordFunctionCallback(count_begin, count_end).scopes({at::RecordScope::USER_SCOPE}));
  body();
  at::removeCallback(callback);
}

TEST(WorkPowerSGD, AProfilerSeesItUntilItIsComplete) {
  count_spans([] {
    ThreadWorkPtr work;
    in_backward([&] { work = make_work(); });
    EXPECT_EQ(spans_begun, 1);
    EXPECT_EQ(spans_ended, 0);
    work->complete();
    EXPECT_EQ(spans_ended, 1);
  });
}

TEST(WorkPowerSGD, IsNotSeenByAProfilerThatMayEndBeforeIt) {
  ThreadWorkPtr work;
  count_spans([&] { work = make_work(); });
  work->complete();
  EXPECT_EQ(spans_begun, 0);
  EXPECT_EQ(spans_ended, 0);
}

TEST_F(StreamWorkTest, AProfilerSeesItsEnqueueing) {
  count_spans([] {
    const auto work = enqueue_on_side_stream([] {});
    EXPECT_EQ(spans_begun, 1);
    EXPECT_EQ(spans_ended, 1);
  });
}

// CombinedWork.

c10::intrusive_ptr<CombinedWork> combine(std::vector<test::WorkPtr> works,
                                         std::vector<at::Tensor> tensors = {}) {
  return c10::make_intrusive<CombinedWork>(std::move(works), std::move(tensors));
}

TEST(CombinedWork, EndsWithTheLastOfItsWorks) {
  const at::Tensor one = at::zeros({1}), two = at::zeros({2});
  const ThreadWorkPtr first = make_work({one}), second = make_work({two});
  const auto both = combine({first, second});
  const auto future = both->getFuture();
  second->complete();
  EXPECT_FALSE(both->isCompleted());
  EXPECT_FALSE(future->completed());
  EXPECT_THROW(both->wait(std::chrono::milliseconds(10)), std::exception);
  first->complete();
  EXPECT_TRUE(both->isCompleted());
  EXPECT_TRUE(both->isSuccess());
  EXPECT_FALSE(both->exception());
  EXPECT_TRUE(both->wait());
  future->waitAndThrow();
  for (const auto& result : {both->result(), future->value().toTensorVector()}) {
    ASSERT_EQ(result.size(), 2u);
    EXPECT_TRUE(result[0].is_same(one));
    EXPECT_TRUE(result[1].is_same(two));
  }
}

TEST(CombinedWork, FailsWithTheFirstThatFailed) {
  const ThreadWorkPtr good = make_work(), first = make_work(), second = make_work();
  const auto all = combine({good, first, second});
  good->complete();
  second->complete(error("second"));
  first->complete(error("first"));
  EXPECT_TRUE(all->isCompleted());
  EXPECT_FALSE(all->isSuccess());
  EXPECT_EQ(error_of([&] { std::rethrow_exception(all->exception()); }), "first");
  EXPECT_EQ(error_of([&] { all->wait(); }), "first");
  EXPECT_EQ(error_of([&] { all->getFuture()->waitAndThrow(); }), "first");
}

// Two streams, each of which sets a number: a user of the Work of both sees both numbers, in any
// order in which the device may run them.
template <class Use>
void expect_both_numbers(const Use& use) {
  for (unsigned seed = 0; seed < 200; ++seed) {
    fake::reset(seed, fake::Host::kMayNotWait);
    std::vector<float> memory(2, -1.0F), seen;
    const at::Tensor tensor = fake::tensor(fake::device(0), memory);
    const auto both = combine({enqueue_on_side_stream([&] { memory[0] = 1; }, {tensor}),
                               enqueue_on_side_stream([&] { memory[1] = 2; }, {tensor})},
                              {tensor});
    fake::use_new_stream(fake::device(0));
    use(*both);
    fake::enqueue(fake::device(0), [&] { seen = memory; });
    fake::run();
    EXPECT_EQ(seen, (std::vector<float>{1, 2}));
  }
}

TEST(CombinedWork, OrdersTheStreamOfItsUserAfterAllOfItsWorks) {
  expect_both_numbers([](CombinedWork& both) { EXPECT_TRUE(both.wait()); });
  expect_both_numbers([](CombinedWork& both) { both.synchronize(); });
  expect_both_numbers([](CombinedWork& both) { both.getFuture()->wait(); });
}

// The future waits on a thread whose current stream is the device's default stream.
TEST(CombinedWork, ItsFutureLeavesTheDefaultStreamAlone) {
  unsigned beside = 0;
  for (unsigned seed = 0; seed < 200; ++seed) {
    fake::reset(seed, fake::Host::kMayNotWait);
    std::vector<float> memory(1, -1.0F);
    std::vector<std::string> ran;
    const at::Tensor tensor = fake::tensor(fake::device(0), memory);
    const auto work = combine(
        {enqueue_on_side_stream([&] { ran.emplace_back("collective"); }, {tensor})}, {tensor});
    std::promise<void> waited;
    work->getFuture()->addCallback([&](c10::ivalue::Future&) { waited.set_value(); });
    waited.get_future().wait();
    fake::enqueue(fake::device(0), [&] { ran.emplace_back("user's"); });
    fake::run();
    beside += ran.front() == "user's";
  }
  EXPECT_GT(beside, 0U);
}

// Its destructor runs when its thread has ended.
struct EndOfThread {
  std::promise<void>* ended = nullptr;
  ~EndOfThread() {
    if (ended) ended->set_value();
  }
};

// Python's interpreter ends a thread that asks for its lock while it ends itself.
TEST(CombinedWork, ACallbackMayEndItsThread) {
  const auto work = make_work();
  const auto all = combine({work});
  std::promise<void> ended;
  all->getFuture()->addCallback([&](c10::ivalue::Future&) {
    thread_local EndOfThread end;
    end.ended = &ended;
    pthread_exit(nullptr);
  });
  work->complete();
  EXPECT_EQ(ended.get_future().wait_for(kNeverReached), std::future_status::ready);
}

}  // namespace
}  // namespace powersgd
