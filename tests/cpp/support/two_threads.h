// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <functional>
#include <future>

#include "support/thread_ranks.h"

namespace powersgd::test {

// Runs both functions, each on a thread of its own. The second begins once the first has. Rethrows
// the first exception when both have returned. If they do not return, the process aborts.
inline void run_both(const std::function<void()>& one, const std::function<void()>& other) {
  std::promise<void> begun;
  run_ranks(2, [&](int thread, const auto&) {
    if (thread == 0) {
      begun.set_value();
      one();
    } else {
      begun.get_future().wait();
      other();
    }
  });
}

}  // namespace powersgd::test
