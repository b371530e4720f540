// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <functional>

namespace powersgd {

// Runs a body without the GIL. Destroying a backend may join Gloo threads, which need the GIL to
// free tensors that Python made: holding it would deadlock (pytorch/pytorch#56297). The Python
// bindings set how to release it.
using RunUnlocked = void (*)(const std::function<void()>& body);
void set_run_unlocked(RunUnlocked run);

// Runs `body` on this thread, without the GIL.
void run_unlocked(const std::function<void()>& body);

// Ends every engine and callback of the process within a time limit, and lets no other begin.
// Called when the interpreter exits before the process groups were destroyed: a callback that
// needed the interpreter after its end would abort the process.
void shutdown_at_exit();

}  // namespace powersgd
