// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <functional>

namespace powersgd {

// Runs `callback` on another thread, without waiting for any other callback to end. A pool of fixed
// size, such as at::launch's, deadlocks when callbacks wait for futures that it has yet to
// complete. Threads are kept for a while for the next callback.
void run_callback(std::function<void()> callback);

// For the exit of an interpreter: waits, within a bound, for the callbacks that run, and lets no
// other begin. One that asked for the interpreter after its end would abort the process.
void end_callbacks();

}  // namespace powersgd
