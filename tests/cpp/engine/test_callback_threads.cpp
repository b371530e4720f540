// SPDX-License-Identifier: BSD-3-Clause
#include "engine/callback_threads.h"

#include <gtest/gtest.h>
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <future>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "engine/jobs.h"

namespace powersgd {
namespace {

using test::kNeverReached;

// Each callback waits for the next one to begin.
TEST(CallbackThreads, NoCallbackWaitsForAnotherToEnd) {
  constexpr size_t kCallbacks = 64;
  std::vector<std::promise<void>> begun(kCallbacks);
  std::vector<std::future<bool>> saw_next;
  for (size_t i = 0; i < kCallbacks; ++i) {
    const auto saw = std::make_shared<std::promise<bool>>();
    saw_next.push_back(saw->get_future());
    run_callback([&, i, saw] {
      begun[i].set_value();
      const bool last = i + 1 == kCallbacks;
      saw->set_value(last || begun[i + 1].get_future().wait_for(kNeverReached) ==
                                 std::future_status::ready);
    });
  }
  for (std::future<bool>& saw : saw_next) EXPECT_TRUE(saw.get());
}

void expect_that_the_next_runs() {
  std::promise<void> ran;
  run_callback([&] { ran.set_value(); });
  EXPECT_EQ(ran.get_future().wait_for(kNeverReached), std::future_status::ready);
}

TEST(CallbackThreads, AnExceptionEndsItsCallbackAlone) {
  run_callback([] { throw std::runtime_error("of a user's callback"); });
  run_callback([] { throw 1; });
  expect_that_the_next_runs();
}

// So does Python's interpreter with a thread that asks for its lock while it ends.
TEST(CallbackThreads, ACallbackMayEndItsThread) {
  run_callback([] { pthread_exit(nullptr); });
  expect_that_the_next_runs();
}

TEST(CallbackThreads, WhatACallbackOwnsMayBeginAnotherWhenItIsDestroyed) {
  for (const bool throws : {false, true}) {
    std::promise<void> ran;
    const auto begin_another = [&](void*) { run_callback([&] { ran.set_value(); }); };
    run_callback([throws, owned = std::shared_ptr<void>(&ran, begin_another)] {
      if (throws) throw std::runtime_error("of a user's callback");
    });
    ASSERT_EQ(ran.get_future().wait_for(kNeverReached), std::future_status::ready);
  }
}

// Exits with 0 if end_callbacks waits for the callback that runs and lets no other begin.
[[noreturn]] void end_callbacks_while_one_runs() {
  std::promise<void> begun, late;
  std::atomic<bool> ended{false};
  run_callback([&] {
    begun.set_value();
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    ended = true;
  });
  begun.get_future().wait();
  end_callbacks();
  const bool waited = ended;
  run_callback([&] { late.set_value(); });
  const auto began = late.get_future().wait_for(std::chrono::milliseconds(50));
  std::_Exit(waited && began == std::future_status::timeout ? 0 : 1);
}

// In a process of its own: callbacks end for good.
TEST(CallbackThreadsDeathTest, AtTheEndThoseThatRunEndAndNoOtherBegins) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(end_callbacks_while_one_runs(), testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace powersgd
