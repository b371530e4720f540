// SPDX-License-Identifier: BSD-3-Clause
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <mutex>
#include <set>
#include <stdexcept>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include "powersgd/backend.h"
#include "powersgd/scope_override.h"
#include "powersgd/stats.h"

#include "ranks/thread_ranks.h"
#include "support/hook_defaults.h"
#include "support/recording_backend.h"

namespace powersgd {
namespace {

using test::ThreadBackend;
using test::ThreadBackends;
using BackendRef = c10::intrusive_ptr<BackendPowerSGD>;

Options always(int64_t rank = 2) {
  Options options = test::hook_defaults();
  options.scope = Scope::kAlways;
  options.matrix_approximation_rank = rank;
  options.start_powerSGD_iter = 0;
  return options;
}

// Runs fn(rank, backend, channels) on `size` ranks, each with its BackendPowerSGD.
void run(int size, const Options& options,
         const std::function<void(int, BackendRef, const test::Channels&)>& fn) {
  const test::Channels channels(size);
  test::run_ranks(size, [&](int rank, const c10::intrusive_ptr<ThreadBackend>& inner) {
    std::vector<InnerAndChannels> inners = {{c10::DeviceType::CPU, inner, channels.of(rank), {}}};
    auto backend = c10::make_intrusive<BackendPowerSGD>(rank, size, std::move(inners), options);
    try {
      fn(rank, backend, channels);
    } catch (...) {
      channels.kill(rank);
      throw;
    }
  });
}

at::Tensor gradient_of(int rank, int64_t rows = 32, int64_t cols = 48) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(rank) + 1);
  return at::randn({rows, cols}, generator);
}

void allreduce(const BackendRef& backend, const at::Tensor& tensor) {
  std::vector<at::Tensor> tensors = {tensor};
  backend->allreduce(tensors)->wait();
}

TEST(BackendPowerSGD, ExactRankComesBackExactly) {
  run(4, always(), [](int rank, const BackendRef& backend, auto&&) {
    const at::Tensor left = gradient_of(100, 32, 2), right = gradient_of(101, 2, 48);
    at::Tensor expected = at::zeros({32, 48});
    for (int r = 1; r <= 4; ++r) expected += left.matmul(right) * r;
    at::Tensor out = left.matmul(right) * (rank + 1);
    allreduce(backend, out);
    EXPECT_TRUE(at::allclose(out, expected, 1e-5, 1e-4));
    EXPECT_EQ(backend->session()->snapshot().compressed_calls, 1);
  });
}

TEST(BackendPowerSGD, OneCollectiveOnEachChannelAndNoneOnTheInner) {
  run(2, always(), [](int rank, const BackendRef& backend, const test::Channels& channels) {
    allreduce(backend, gradient_of(rank));
    const auto p = channels.p(rank).calls(), q = channels.q(rank).calls();
    ASSERT_EQ(p.size(), 1u);
    ASSERT_EQ(q.size(), 1u);
    EXPECT_EQ(p[0].numel, 2 * 32 + 2);  // P, its use and the non-finite count
    EXPECT_EQ(q[0].numel, 2 * 48);      // Q
  });
}

// A backend over an inner backend and two channels that record their calls.
struct Recorded {
  std::vector<c10::intrusive_ptr<test::RecordingBackend>> recorders;
  BackendRef backend;

  Recorded() {
    for (int i = 0; i < 3; ++i) recorders.push_back(c10::make_intrusive<test::RecordingBackend>());
    std::vector<InnerAndChannels> inners = {
        {c10::DeviceType::CPU, recorders[0], test::ready_channels(recorders[1], recorders[2]), {}}};
    backend = c10::make_intrusive<BackendPowerSGD>(0, 2, std::move(inners), always());
    backend->session()->connect(at::kCPU);
    backend->session()->run_after_steps(at::kCPU, [] {});
  }

  void expect_one_call_each(const std::string& method) const {
    for (const auto& recorder : recorders) {
      ASSERT_EQ(recorder->calls.size(), 1u);
      EXPECT_EQ(recorder->calls[0].method, method);
    }
  }
};

TEST(BackendPowerSGD, TimeoutReachesTheChannels) {
  const Recorded recorded;
  recorded.backend->setTimeout(std::chrono::milliseconds(1234));
  recorded.expect_one_call_each("setTimeout");
}

#ifdef POWERSGD_BACKEND_HAS_LIFECYCLE
TEST(BackendPowerSGD, EphemeralTimeoutReachesTheChannels) {
  const Recorded recorded;
  recorded.backend->addEphemeralTimeout(std::chrono::milliseconds(5));
  recorded.expect_one_call_each("addEphemeralTimeout");
}
#endif

TEST(BackendPowerSGD, AnEndThatFailsInOnePlaceReachesTheOthers) {
  using End = void (BackendPowerSGD::*)();
  const std::map<std::string, End> ends = {{"shutdown", &BackendPowerSGD::shutdown},
                                           {"abort", &BackendPowerSGD::abort}};
  for (const auto& [method, end] : ends) {
    const Recorded recorded;
    for (const auto& recorder : recorded.recorders) recorder->fails = true;
    EXPECT_THROW((*recorded.backend.*end)(), c10::Error);
    recorded.expect_one_call_each(method);
    EXPECT_THROW(allreduce(recorded.backend, gradient_of(0)), c10::Error);
  }
}

#ifdef C10D_BACKEND_HAS_RECONFIGURE
TEST(BackendPowerSGD, CannotBeReconfigured) {
  const Recorded recorded;
  EXPECT_FALSE(recorded.backend->supportsReconfigure());
  EXPECT_THROW(recorded.backend->get_reconfigure_handle(), c10::Error);
  EXPECT_THROW(recorded.backend->reconfigure({}), c10::Error);
  for (const auto& recorder : recorded.recorders) EXPECT_TRUE(recorder->calls.empty());
}
#endif

TEST(BackendPowerSGD, OutputsAreBitIdenticalOverRanks) {
  std::mutex mutex;
  std::vector<at::Tensor> outputs;
  run(4, always(), [&](int rank, const BackendRef& backend, auto&&) {
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

TEST(BackendPowerSGD, AverageIsTheSumOverTheRanks) {
  run(2, always(), [](int rank, const BackendRef& backend, auto&&) {
    at::Tensor sum = gradient_of(rank), average = sum.clone();
    allreduce(backend, sum);
    std::vector<at::Tensor> tensors = {average};
    c10d::AllreduceOptions opts;
    opts.reduceOp = c10d::ReduceOp::AVG;
    backend->allreduce(tensors, opts)->wait();
    EXPECT_TRUE(at::allclose(average * 2, sum, 1e-5, 1e-6));
  });
}

TEST(BackendPowerSGD, WhatIsNotAdmittedIsForwardedExactly) {
  Options options = always();
  options.scope = Scope::kBackward;
  run(2, options, [](int rank, const BackendRef& backend, auto&&) {
    at::Tensor out = gradient_of(rank);
    allreduce(backend, out);
    EXPECT_TRUE(at::equal(out, gradient_of(0) + gradient_of(1)));
    push_override(true);
    out = gradient_of(rank);
    allreduce(backend, out);
    pop_override();
    EXPECT_FALSE(at::equal(out, gradient_of(0) + gradient_of(1)));
    EXPECT_EQ(backend->session()->snapshot().compressed_calls, 1);
  });
}

TEST(BackendPowerSGD, ErrorFeedbackDeliversEverythingInABlock) {
  run(2, always(1), [](int rank, const BackendRef& backend, auto&&) {
    at::Tensor sent = at::zeros({32, 48});
    for (int step = 0; step < 60; ++step) {
      at::Tensor out = step == 0 ? gradient_of(rank) : at::full({32, 48}, 1e-20);
      push_override(true);  // one block per step: the tensor keeps its identity
      allreduce(backend, out);
      pop_override();
      sent += out;
    }
    // Each step sends at least the residual's leading direction; 32 of them are all there is.
    const at::Tensor asked = gradient_of(0) + gradient_of(1);
    EXPECT_LT(((sent - asked).norm() / asked.norm()).item<double>(), 1e-3);
  });
}

TEST(BackendPowerSGD, ANonFiniteGradientSkipsTheStepEverywhere) {
  run(2, always(), [](int rank, const BackendRef& backend, auto&&) {
    at::Tensor out = gradient_of(rank);
    if (rank == 1) out[3][5] = std::numeric_limits<float>::infinity();
    allreduce(backend, out);
    EXPECT_TRUE(at::isnan(out).all().item<bool>());
    EXPECT_EQ(backend->session()->snapshot().skipped_steps, 1);
    out = gradient_of(rank);
    allreduce(backend, out);
    EXPECT_TRUE(at::isfinite(out).all().item<bool>());
  });
}

TEST(BackendPowerSGD, AnErrorInAnyStageReachesTheWorkAndItsFuture) {
  for (const Stage stage : {Stage::kProject, Stage::kReduceP, Stage::kOrthogonalize,
                            Stage::kBackProject, Stage::kReduceQ, Stage::kReconstruct}) {
    run(2, always(), [stage](int rank, const BackendRef& backend, auto&&) {
      backend->session()->set_stage_probe([stage](const char* reached) {
        if (std::string(reached) == to_string(stage)) throw std::runtime_error("injected");
      });
      const at::Tensor gradient = gradient_of(rank);
      std::vector<at::Tensor> tensors = {gradient.clone()};
      const auto work = backend->allreduce(tensors);
      const auto future = work->getFuture();
      EXPECT_THROW(work->wait(), std::runtime_error) << to_string(stage);
      EXPECT_THROW(future->waitAndThrow(), std::exception) << to_string(stage);
      EXPECT_TRUE(work->isCompleted());
      EXPECT_FALSE(work->isSuccess());
      EXPECT_TRUE(at::equal(tensors[0], gradient));
      backend->session()->set_stage_probe({});
      EXPECT_NO_THROW(allreduce(backend, gradient_of(rank)));
    });
  }
}

TEST(BackendPowerSGD, AFailedPeerIsAnErrorAndNotAHang) {
  std::atomic<int> failed{0};
  run(2, always(), [&](int rank, const BackendRef& backend, const test::Channels& channels) {
    if (rank == 0) channels.q(rank).inject_failure(0);
    try {
      allreduce(backend, gradient_of(rank));
    } catch (const std::exception&) {
      ++failed;
    }
  });
  EXPECT_EQ(failed, 2);
}

TEST(BackendPowerSGD, ACallbackMayWaitForAnotherAllreduce) {
  run(2, always(), [](int rank, const BackendRef& backend, auto&&) {
    std::vector<at::Tensor> tensors = {gradient_of(rank)};
    const auto chained = backend->allreduce(tensors)->getFuture()->then(
        [&](c10::ivalue::Future&) {
          std::vector<at::Tensor> more = {gradient_of(rank + 7)};
          backend->allreduce(more)->getFuture()->waitAndThrow();
          return c10::IValue(1);
        },
        c10::IntType::get());
    chained->waitAndThrow();
    EXPECT_EQ(chained->value().toInt(), 1);
  });
}

TEST(BackendPowerSGD, AfterShutdownACompressedCallIsAnError) {
  run(2, always(), [](int rank, const BackendRef& backend, auto&&) {
    allreduce(backend, gradient_of(rank));
    backend->shutdown();
    EXPECT_THROW(allreduce(backend, gradient_of(rank)), c10::Error);
  });
}

TEST(BackendPowerSGD, CoalescedTensorsAreCompressedOnlyInScopeAlways) {
  for (const Scope scope : {Scope::kAlways, Scope::kBackward}) {
    Options options = always();
    options.scope = scope;
    run(2, options, [scope](int rank, const BackendRef& backend, auto&&) {
      std::vector<at::Tensor> tensors = {gradient_of(rank), at::ones({3})};
      const auto work = backend->allreduce_coalesced(tensors);
      work->wait();
      EXPECT_TRUE(work->isCompleted() && work->isSuccess());
      EXPECT_TRUE(at::equal(tensors[1], at::full({3}, 2)));
      EXPECT_EQ(backend->session()->snapshot().compressed_calls, scope == Scope::kAlways ? 1 : 0);
    });
  }
}

TEST(BackendPowerSGD, ASplitGroupCompressesToo) {
  run(4, always(), [](int rank, const BackendRef& backend, auto&&) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    const std::vector<int> ranks = {rank & ~1, rank | 1};
    const auto child = backend->split(store, ranks, nullptr);
    auto* const half = dynamic_cast<BackendPowerSGD*>(child.get());
    ASSERT_NE(half, nullptr);
    EXPECT_EQ(half->getSize(), 2);
    std::vector<at::Tensor> tensors = {gradient_of(rank)};
    half->allreduce(tensors)->wait();
    EXPECT_EQ(half->session()->snapshot().compressed_calls, 1);
  });
}

}  // namespace
}  // namespace powersgd
