// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <functional>

namespace powersgd {

// The lock of the interpreter that embeds this library, if there is one. Whoever lets go of a
// backend may join its threads, and Gloo's want Python's lock to drop a tensor that Python made: a
// destructor that held it would wait for ever. The interpreter's bindings say how to do without it.
using RunUnlocked = void (*)(const std::function<void()>& body);
void set_run_unlocked(RunUnlocked run);

// Runs `body` on this thread, which does not hold the lock meanwhile.
void run_unlocked(const std::function<void()>& body);

}  // namespace powersgd
