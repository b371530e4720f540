// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <functional>

namespace powersgd {

// Runs `callback` on another thread, and never makes it wait for another callback. A pool of fixed
// size, such as at::launch's, deadlocks when callbacks wait for futures that it has yet to
// complete. A thread stays idle for a while to serve the next callback.
void run_callback(std::function<void()> callback);

// Waits, up to a time limit, for running callbacks, and lets no other begin.
void end_callbacks();

}  // namespace powersgd
