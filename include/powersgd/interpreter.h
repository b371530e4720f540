// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <functional>

namespace powersgd {

// Runs a body without the interpreter's lock. Whoever drops a backend may join its threads, and
// Gloo's need Python's lock to drop a tensor that Python made: a destructor that held the lock
// would wait for ever. The interpreter's bindings set how to do it.
using RunUnlocked = void (*)(const std::function<void()>& body);
void set_run_unlocked(RunUnlocked run);

// Runs `body` on this thread, which does not hold the lock meanwhile.
void run_unlocked(const std::function<void()>& body);

// Ends every engine and every callback of the process within a bound, and lets no other begin. It
// is called when an interpreter exits whose user did not destroy the process groups: a callback
// that needs the interpreter after its end would abort the process.
void shutdown_at_exit();

}  // namespace powersgd
