// SPDX-License-Identifier: BSD-3-Clause
//
// Two threads that end an engine at once while a job hangs in the inner backend.
#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/jobs.h"
#include "engine/stream_engine.h"
#include "engine/thread_engine.h"
#include "engine/work.h"
#include "fake_device/fake_device.h"
#include "ranks/thread_ranks.h"
#include "ranks/two_equal_ranks.h"
#include "support/errors.h"

namespace powersgd {
namespace {

namespace fake = test::fake_device;
using std::chrono::milliseconds;
using test::Gate;
using test::job_of;
using test::kNeverReached;
using test::kShort;
using test::submit;
using test::WorkPtr;

std::shared_ptr<ThreadEngine> make_thread_engine(Grace grace) {
  return std::make_shared<ThreadEngine>(0, test::connection_of_one(), grace);
}

void wait_until_refused(Engine& engine) {
  const auto submits = [&] { submit(engine, job_of([](Channel&) {})); };
  while (!test::contains(test::error_of(submits), "shut down or aborted")) {
    std::this_thread::sleep_for(milliseconds(1));
  }
}

TEST(EngineEnds, EveryPairOfEndsReturnsWhileAJobHangs) {
  using Owner = std::shared_ptr<ThreadEngine>;
  const std::map<std::string, std::function<void(Owner)>> ends = {
      {"abort", [](const Owner& engine) { engine->abort(); }},
      {"shutdown", [](const Owner& engine) { engine->shutdown(); }},
      {"destruction", [](Owner engine) { engine.reset(); }},
      {"exit", [](Owner engine) {
         engine.reset();
         shutdown_all_engines();
       }}};
  for (const auto& [one, run_one] : ends) {
    for (const auto& [other, run_other] : ends) {
      SCOPED_TRACE(one + " and then " + other);
      Owner engine = make_thread_engine(kShort);
      const Gate gate;
      std::vector<WorkPtr> works = {submit(*engine, job_of(gate.part()))};
      gate.wait_until_reached();
      for (int i = 0; i < 3; ++i) {
        works.push_back(submit(*engine, job_of([](Channel&) { FAIL() << "ran after the end"; })));
      }
      Owner of_one = engine, of_other = std::move(engine);
      test::run_both([&, end = run_one] { end(std::move(of_one)); },
                     [&, end = run_other] { end(std::move(of_other)); });
      EXPECT_FALSE(works[0]->isCompleted());
      for (size_t i = 1; i < works.size(); ++i) EXPECT_THROW(works[i]->wait(), c10::Error);
      gate.open();
      EXPECT_TRUE(works[0]->wait());
    }
  }
}

TEST(EngineEnds, AnAbortEndsTheWaitOfAShutdown) {
  const auto engine = make_thread_engine({std::chrono::hours(1), milliseconds(5)});
  const Gate gate;
  const auto work = submit(*engine, job_of(gate.part()));
  gate.wait_until_reached();
  test::run_both([&] { engine->shutdown(); },
                 [&] {
                   wait_until_refused(*engine);
                   engine->abort();
                 });
  gate.open();
  EXPECT_TRUE(work->wait());
}

TEST(EngineEnds, WhatAJobOwnsMayUseTheEngineWhenItIsDestroyed) {
  const auto engine = make_thread_engine(kShort);
  const Gate gate;
  std::promise<std::string> said;
  const auto use_engine = [&](void*) {
    said.set_value(test::error_of([&] { submit(*engine, job_of([](Channel&) {})); }));
  };
  submit(*engine,
         job_of(gate.part(), [owned = std::shared_ptr<void>(&said, use_engine)](Channel&) {}));
  gate.wait_until_reached();
  engine->abort();
  gate.open();
  auto error = said.get_future();
  ASSERT_EQ(error.wait_for(kNeverReached), std::future_status::ready);
  EXPECT_TRUE(test::contains(error.get(), "shut down or aborted"));
}

TEST(EngineEnds, AnEngineHasEndedOnceALostJobIsUndone) {
  const auto engine = make_thread_engine(kShort);
  const Gate gate;
  std::atomic<bool> undone{false};
  Job job = job_of(gate.part(), [](Channel&) {});
  job.undo = [&] {
    std::this_thread::sleep_for(milliseconds(20));  // a thread that does not wait gets past here
    undone = true;
  };
  submit(*engine, std::move(job));
  gate.wait_until_reached();
  engine->abort();
  EXPECT_FALSE(undone) << "the thread is left behind";
  gate.open();
  engine->wait_for_end(at::kCPU);
  EXPECT_TRUE(undone);
}

// A stream engine.

Job job_that_more_follow(test::Part first = [](Channel&) {}) {
  Job job = job_of(std::move(first), [](Channel&) {});
  job.more_follow = true;
  return job;
}

// True if the job has ended without anyone who waits for it.
bool has_ended(const WorkPtr& work) {
  return static_cast<StreamWork&>(*work).future_without_flush()->completed();
}

std::function<void()> in_the_middle;  // of a submission

// A profiler, which sees a Work while it is made.
std::unique_ptr<at::ObserverContext> observe(const at::RecordFunction&) {
  if (in_the_middle) std::exchange(in_the_middle, nullptr)();
  return nullptr;
}

TEST(EngineEnds, AJobThatIsBeingSubmittedIsRefused) {
  fake::reset(0, fake::Host::kMayNotWait);
  StreamEngine engine(0, c10::make_intrusive<test::StreamBackend>());
  const auto profiler = at::addThreadLocalCallback(
      at::RecordFunctionCallback(observe).scopes({at::RecordScope::USER_SCOPE}));
  in_the_middle = [&] { std::thread([&] { engine.shutdown(); }).join(); };
  const std::string error =
      test::error_of([&] { submit(engine, job_that_more_follow(), fake::device(0)); });
  at::removeCallback(profiler);
  EXPECT_TRUE(test::contains(error, "shut down or aborted")) << error;
}

TEST(EngineEnds, ASubmitterThatHangsLongerThanTheEndWaitsLeavesNothingPutOff) {
  using EndOf = void (StreamEngine::*)();
  for (const EndOf end : {&StreamEngine::shutdown, &StreamEngine::abort}) {
    fake::reset(0, fake::Host::kMayNotWait);
    StreamEngine engine(0, c10::make_intrusive<test::StreamBackend>(), kShort);
    const Gate gate;
    WorkPtr work;
    test::run_both(
        [&] { work = submit(engine, job_that_more_follow(gate.part()), fake::device(0)); },
        [&] {
          gate.wait_until_reached();
          (engine.*end)();
          gate.open();
        });
    EXPECT_TRUE(has_ended(work));
  }
}

}  // namespace
}  // namespace powersgd
