// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <chrono>
#include <functional>
#include <vector>

#include "ranks/connected.h"
#include "ranks/thread_backend.h"

namespace powersgd::test {

// Runs fn(rank, backend) on a thread per rank, waits for all, and rethrows the first exception. A
// rank that throws or stops at a failed ASSERT is killed, so that its peers do not wait for it. If
// ranks still run after `limit`, the process aborts and names them.
void run_ranks(int size, const std::function<void(int, c10::intrusive_ptr<ThreadBackend>)>& fn,
               std::chrono::milliseconds limit = std::chrono::minutes(10));

// Runs both functions, each on a thread of its own. The second begins once the first has. Rethrows
// the first exception when both have returned. If they do not return, the process aborts.
void run_both(const std::function<void()>& one, const std::function<void()>& other);

}  // namespace powersgd::test
