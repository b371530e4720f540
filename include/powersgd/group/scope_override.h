// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <optional>

namespace powersgd {

// The effect of `with torch_powersgd.scope(...)` on the calls inside the block.
// c10::ThreadLocalDebugInfo carries it, and autograd passes that on to its own threads, so it holds
// for the allreduces of a backward pass that was started inside the block.
struct ScopeOverride {
  bool enabled;
  int64_t block;  // differs for every block entered in this process
};

std::optional<ScopeOverride> current_override();

// Called on the same thread, in pairs.
void push_override(bool enabled);
void pop_override();

}  // namespace powersgd
