// SPDX-License-Identifier: BSD-3-Clause
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "group/sessions.h"
#include "model/scope_block.h"
#include "powersgd/group/backend.h"
#include "powersgd/group/stats.h"
#include "support/hook_defaults.h"
#include "support/random.h"
#include "support/recording_backend.h"

namespace powersgd {
namespace {

using BackendRef = c10::intrusive_ptr<BackendPowerSGD>;

at::Tensor gradient_of(int rank) { return test::random(static_cast<uint64_t>(rank), {32, 48}); }

// Begins a compressed allreduce.
c10::intrusive_ptr<c10d::Work> begin(const BackendRef& backend, const at::Tensor& tensor) {
  const test::ScopeBlock block(true);
  std::vector<at::Tensor> tensors = {tensor};
  return backend->allreduce(tensors);
}

void allreduce(const BackendRef& backend, const at::Tensor& tensor) {
  begin(backend, tensor)->wait();
}

// Several ranks, each with its backend.

// Runs fn(rank, backend, engines) on each of `size` ranks.
void run(int size,
         const std::function<void(int, const BackendRef&, const test::ThreadBackends&)>& fn) {
  test::run_with_engines(size, [&](int rank, InnerAndConnect inner, const auto& engines) {
    fn(rank,
       c10::make_intrusive<BackendPowerSGD>(rank, size, std::vector{inner}, test::compressing(2)),
       engines);
    EXPECT_TRUE(dynamic_cast<test::ThreadBackend&>(*inner.inner).calls().empty());
  });
}

TEST(BackendPowerSGD, OneMessageForEachPayloadAndNoneOnTheInner) {
  run(2, [](int rank, const BackendRef& backend, const test::ThreadBackends& engines) {
    allreduce(backend, gradient_of(rank));
    std::vector<int64_t> sent;
    for (const auto& call : engines[static_cast<size_t>(rank)]->calls()) {
      if (call.operation == "send") sent.push_back(call.numel);
    }
    // P, its use and the non-finite count, and Q.
    EXPECT_EQ(sent, (std::vector<int64_t>{2 * 32 + 2, 2 * 48}));
  });
}

TEST(BackendPowerSGD, OutputsAreBitIdenticalOverRanks) {
  std::mutex mutex;
  std::vector<at::Tensor> outputs;
  run(4, [&](int rank, const BackendRef& backend, auto&&) {
    at::Tensor out;
    for (int step = 0; step < 10; ++step) {
      out = gradient_of(rank * 100 + step);
      allreduce(backend, out);
    }
    const std::lock_guard<std::mutex> lock(mutex);
    outputs.push_back(out);
  });
  for (const at::Tensor& output : outputs) EXPECT_TRUE(at::equal(output, outputs[0]));
}

TEST(BackendPowerSGD, AnErrorInAnyStageReachesTheWorkAndItsFuture) {
  for (const Stage stage : {Stage::kProject, Stage::kReduceP, Stage::kOrthogonalize,
                            Stage::kBackProject, Stage::kReduceQ, Stage::kReconstruct}) {
    SCOPED_TRACE(to_string(stage));
    run(2, [stage](int rank, const BackendRef& backend, auto&&) {
      backend->session()->set_stage_probe([stage](const char* reached, int64_t) {
        if (std::string(reached) == to_string(stage)) throw std::runtime_error("injected");
      });
      const at::Tensor gradient = gradient_of(rank), output = gradient.clone();
      const auto work = begin(backend, output);
      const auto future = work->getFuture();
      EXPECT_THROW(work->wait(), std::runtime_error);
      EXPECT_THROW(future->waitAndThrow(), std::exception);
      EXPECT_TRUE(work->isCompleted());
      EXPECT_FALSE(work->isSuccess());
      EXPECT_TRUE(at::equal(output, gradient));
      backend->session()->set_stage_probe({});
      EXPECT_NO_THROW(allreduce(backend, gradient_of(rank)));
    });
  }
}

// One backend over an inner backend and an engine's, which record their calls.

class RecordedBackend : public testing::Test {
 protected:
  RecordedBackend() {
    for (int i = 0; i < 2; ++i) recorders_.push_back(c10::make_intrusive<test::RecordingBackend>());
    std::vector<InnerAndConnect> inners = {
        {c10::DeviceType::CPU, recorders_[0], test::connected(recorders_[1]), {}}};
    backend_ = c10::make_intrusive<BackendPowerSGD>(0, 2, std::move(inners), test::compressing(2));
    backend_->session()->connect(at::kCPU);
    backend_->session()->run_after_steps(at::kCPU, [] {});
  }

  void expect_one_call_each(const std::string& method) {
    for (const auto& recorder : recorders_) {
      ASSERT_EQ(recorder->calls.size(), 1u);
      EXPECT_EQ(recorder->calls[0].method, method);
      recorder->calls.clear();
    }
  }

  std::vector<c10::intrusive_ptr<test::RecordingBackend>> recorders_;
  BackendRef backend_;
};

TEST_F(RecordedBackend, TimeoutsReachTheEngines) {
  backend_->setTimeout(std::chrono::milliseconds(1234));
  expect_one_call_each("setTimeout");
#ifdef POWERSGD_BACKEND_HAS_LIFECYCLE
  backend_->addEphemeralTimeout(std::chrono::milliseconds(5));
  expect_one_call_each("addEphemeralTimeout");
#endif
}

TEST_F(RecordedBackend, AShutdownThatFailsInOnePlaceReachesTheOthers) {
  for (const auto& recorder : recorders_) recorder->fails = true;
  EXPECT_THROW(backend_->shutdown(), c10::Error);
  expect_one_call_each("shutdown");
  EXPECT_THROW(allreduce(backend_, gradient_of(0)), c10::Error);
}

TEST_F(RecordedBackend, AnAbortThatFailsInOnePlaceReachesTheOthers) {
  for (const auto& recorder : recorders_) recorder->fails = true;
  EXPECT_THROW(backend_->abort(), c10::Error);
  expect_one_call_each("abort");
  EXPECT_THROW(allreduce(backend_, gradient_of(0)), c10::Error);
}

#ifdef C10D_BACKEND_HAS_RECONFIGURE
TEST_F(RecordedBackend, CannotBeReconfigured) {
  EXPECT_FALSE(backend_->supportsReconfigure());
  EXPECT_THROW(backend_->get_reconfigure_handle(), c10::Error);
  EXPECT_THROW(backend_->reconfigure({}), c10::Error);
  for (const auto& recorder : recorders_) EXPECT_TRUE(recorder->calls.empty());
}
#endif

}  // namespace
}  // namespace powersgd
