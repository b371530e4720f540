// SPDX-License-Identifier: BSD-3-Clause
#include "powersgd/engine/interpreter.h"

#include <atomic>

#include "engine/callback_threads.h"
#include "engine/thread_engine.h"

namespace powersgd {
namespace {

std::atomic<RunUnlocked> unlocked_runner{nullptr};

}  // namespace

void set_run_unlocked(RunUnlocked run) { unlocked_runner = run; }

void run_unlocked(const std::function<void()>& body) {
  if (const RunUnlocked run = unlocked_runner) return run(body);
  body();
}

void shutdown_at_exit() {
  shutdown_all_engines();
  end_callbacks();
}

}  // namespace powersgd
