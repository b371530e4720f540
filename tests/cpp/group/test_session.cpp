// SPDX-License-Identifier: BSD-3-Clause
#include "powersgd/group/session.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "fake_device/fake_device.h"
#include "group/replicas.h"
#include "group/sessions.h"
#include "powersgd/group/scope_override.h"
#include "ranks/one_rank.h"
#include "support/hook_defaults.h"

namespace powersgd {
namespace {

using test::contains;
using test::error_of;

// The session of rank 0 of two equal ranks, and its log.
class SessionTest : public testing::Test {
 protected:
  std::shared_ptr<Session> make(const Options& options = test::compressing(2)) {
    return test::session_of_equal_ranks(at::kCPU, options, log_.sink());
  }
  std::shared_ptr<Session> make_starting_at(int64_t step) {
    Options options = test::compressing(2);
    options.start_powerSGD_iter = step;
    return make(options);
  }
  static void reduce_compressed(Session& session) {
    const test::OneRank bucket(session.options(), at::kFloat, at::kCPU, session.ranks_on(at::kCPU));
    const at::Tensor gradient = at::ones({bucket.plan.gradient_numel});
    session.allreduce_compressed(bucket.compressor, gradient, {}, session.stats())->wait();
  }

  test::Log log_;
};

TEST_F(SessionTest, AnErrorNamesADeviceWithoutAnInnerBackend) {
  const auto session = make();
  const at::Tensor elsewhere = at::zeros({2}, c10::DeviceType::Meta);
  const std::string part = "no inner backend for meta";
  EXPECT_TRUE(
      contains(error_of([&] { session->average_exact(elsewhere, 2, *session->stats()); }), part));
  std::vector<at::Tensor> tensors = {elsewhere};
  EXPECT_TRUE(contains(error_of([&] { session->average_after_steps(tensors); }), part));
}

TEST_F(SessionTest, ExactAveragesAreDividedFirstAndCounted) {
  const auto session = make();
  const at::Tensor gradient = at::tensor({3e38F, 1.0F});  // whose sum would overflow
  session->average_exact(gradient, 4, *session->stats());
  EXPECT_TRUE(at::equal(gradient, at::tensor({3e38F * 0.25F, 0.25F}) * 2));
  EXPECT_EQ(session->snapshot().exact_calls, 1);
  EXPECT_EQ(session->snapshot().bytes_after, 8);
  std::vector<at::Tensor> tensors = {at::ones({3}), at::full({2}, 5.0)};
  session->average_after_steps(tensors);
  EXPECT_TRUE(at::equal(tensors[0], at::ones({3})));
  EXPECT_TRUE(at::equal(tensors[1], at::full({2}, 5.0)));
}

// Jobs that nobody waits for. The next collective on the same engine has their exception, once.

constexpr const char* kDamaged = "initialized dtype";

ParameterStatePtr make_damaged() {
  auto state = std::make_shared<ParameterState>();
  ParameterState::allocate({{state.get(), {20, 30}, 2}}, test::hook_defaults(), at::kCPU);
  state->p_hat = at::Tensor();
  return state;
}

TEST_F(SessionTest, ACheckThatFailsIsAnErrorOfTheNextCollective) {
  const auto session = make();
  const std::vector<Replica> good = {{"good", std::make_shared<ParameterState>()}};
  std::vector<at::Tensor> tensors = {at::ones({3})};
  const std::vector<std::function<void()>> collectives = {
      [&] { reduce_compressed(*session); },
      [&] { session->average_after_steps(tensors); },
      [&] { session->share_replicas(good, at::kCPU, 0); },
  };
  for (const std::function<void()>& collective : collectives) {
    session->check_replicas({{"damaged", make_damaged()}}, at::kCPU, session->stats());
    session->run_after_steps(at::kCPU, [] {});  // a state that moves does not fail
    session->snapshot();
    const std::string error = error_of(collective);
    EXPECT_TRUE(contains(error, kDamaged)) << error;
    EXPECT_EQ(error_of(collective), "no error");
  }
  session->check_replicas({{"damaged", make_damaged()}}, at::kCPU, session->stats());
  session->check_replicas(good, at::kCPU, session->stats());  // fails with the first one's
  EXPECT_TRUE(contains(error_of(collectives.front()), kDamaged));
  EXPECT_EQ(error_of(collectives.front()), "no error");
}

TEST_F(SessionTest, AJobThatNobodyWaitsForFailsTheNextStepOnItsDevice) {
  for (const at::Device device : {at::Device(at::kCPU), test::fake_device::device(0)}) {
    test::fake_device::reset(0, test::fake_device::Host::kMayNotWait);
    const auto session = test::session_of_equal_ranks(device, test::compressing(2));
    const auto fail = [] { throw std::runtime_error("of the job"); };
    session->leave_unwatched(session->start_after_steps(device, fail), device);
    std::vector<at::Tensor> tensors = {at::ones({3}, device)};
    const auto average = [&] { session->average_after_steps(tensors); };
    EXPECT_EQ(error_of(average), "of the job");
    EXPECT_EQ(error_of(average), "no error");
  }
}

TEST_F(SessionTest, AShutdownLogsWhatNoCollectiveHasSaid) {
  const auto session = make();
  session->check_replicas({{"damaged", make_damaged()}}, at::kCPU, session->stats());
  session->shutdown();
  EXPECT_EQ(log_.count("warning: after the last step: "), 1);
}

TEST_F(SessionTest, WhatNeedsNoOtherRankGoesOnAfterItsEnd) {
  for (const auto end : {&Session::abort, &Session::shutdown}) {
    const auto session = make();
    const auto fails = [] { TORCH_CHECK_WITH(DistBackendError, false, "its own error"); };
    EXPECT_THROW(session->run_after_steps(at::kCPU, fails), c10::DistBackendError);
    reduce_compressed(*session);
    (*session.*end)();
    int ran = 0;
    session->run_after_steps(at::kCPU, [&] { ++ran; });
    EXPECT_EQ(ran, 1);
    EXPECT_EQ(session->snapshot().compressed_calls, 1);
    EXPECT_THROW(reduce_compressed(*session), c10::DistBackendError);
    EXPECT_THROW(session->run_after_steps(at::kCPU, fails), c10::DistBackendError);
  }
}

TEST_F(SessionTest, TheOverrideOfTheThreadComesBeforeTheScope) {
  for (const Scope scope : {Scope::kNever, Scope::kBackward, Scope::kAttached}) {
    Options options = test::compressing(2);
    options.scope = scope;
    const auto session = make(options);
    EXPECT_EQ(session->admits_attached(options), scope != Scope::kNever);
    for (const bool enabled : {true, false}) {
      push_override(enabled);
      EXPECT_EQ(session->admits_attached(options), enabled);
      pop_override();
    }
    const Session alone(0, 1, {}, options, {});
    EXPECT_FALSE(alone.admits_attached(options)) << "a group of one has nothing to send";
  }
}

TEST_F(SessionTest, StatisticsAreLoggedEveryFewSteps) {
  Options options = test::compressing(2);
  options.compression_stats_logging_frequency = 3;
  const auto session = make(options);
  for (int step = 0; step < 7; ++step) session->end_step(*session->stats(), options);
  EXPECT_EQ(log_.lines.size(), 2u);
  EXPECT_EQ(log_.count("info: 3 steps"), 1);
  EXPECT_EQ(log_.count("info: 6 steps"), 1);
}

TEST_F(SessionTest, ResetStatisticsCountFromHere) {
  const auto session = make();
  reduce_compressed(*session);
  session->end_step(*session->stats(), session->options());
  EXPECT_EQ(session->snapshot().compressed_calls, 1);
  session->reset_stats(*session->stats());
  EXPECT_EQ(session->snapshot().compressed_calls, 0);
  EXPECT_EQ(session->snapshot().steps, 0);
  reduce_compressed(*session);
  EXPECT_EQ(session->snapshot().compressed_calls, 1);
  EXPECT_TRUE(session->compressing());
}

TEST_F(SessionTest, OnceSomethingWasAttachedItSaysWhenCompressionStarts) {
  const auto session = make_starting_at(5);
  EXPECT_FALSE(session->was_attached());
  EXPECT_EQ(session->starts_at(), 5);
  session->note_attached(std::nullopt);
  EXPECT_TRUE(session->was_attached());
  EXPECT_EQ(session->starts_at(), std::nullopt) << "nothing attached is compressed";
  session->note_attached(7);
  session->note_attached(9);
  EXPECT_EQ(session->starts_at(), 7);
}

TEST_F(SessionTest, TrainingThatEndsBeforeCompressionStartsIsReportedOnce) {
  const auto session = make_starting_at(5);
  EXPECT_EQ(session->starts_at(), 5);
  EXPECT_EQ(session->not_started(), "") << "nothing was trained";
  for (int step = 0; step < 3; ++step) session->end_step(*session->stats(), session->options());
  EXPECT_EQ(session->not_started(/*soon=*/2), "") << "it starts within two steps";
  session->shutdown();
  EXPECT_EQ(log_.lines.size(), 1u);
  EXPECT_EQ(log_.count("warning: nothing has been compressed in 3 steps: compression starts at "
                       "step 5"),
            1);
  EXPECT_EQ(session->not_started(), "");
}

TEST_F(SessionTest, ALogThatFailsDoesNotKeepAShutdown) {
  Options options = test::compressing(2);
  options.start_powerSGD_iter = 5;
  const auto session = test::session_of_equal_ranks(
      at::kCPU, options,
      [](LogLevel, const std::string&) { throw std::runtime_error("of the log"); });
  session->end_step(*session->stats(), session->options());
  EXPECT_EQ(error_of([&] { session->shutdown(); }), "of the log");
  EXPECT_TRUE(contains(error_of([&] { reduce_compressed(*session); }), "shut down or aborted"));
}

TEST_F(SessionTest, TrainingThatCompressedHasNothingToReport) {
  const auto session = make_starting_at(5);
  session->end_step(*session->stats(), session->options());
  reduce_compressed(*session);
  EXPECT_EQ(session->not_started(), "");
}

TEST_F(SessionTest, NothingStartsInAGroupThatNeverCompresses) {
  Options never = test::compressing(2);
  never.scope = Scope::kNever;
  EXPECT_EQ(make(never)->starts_at(), std::nullopt);
  EXPECT_EQ(Session(0, 1, {}, test::compressing(2), {}).starts_at(), std::nullopt);
}

}  // namespace
}  // namespace powersgd
