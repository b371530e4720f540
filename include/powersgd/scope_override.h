// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <optional>

namespace powersgd {

// What `with torch_powersgd.compression(enabled)` says for the calls inside. It is carried by
// c10::ThreadLocalDebugInfo, which autograd hands on to its own threads, so that it holds for the
// allreduces of a backward pass that was started inside the block.
struct ScopeOverride {
  bool enabled;
  int64_t block;  // differs for every block entered in this process
};

std::optional<ScopeOverride> current_override();

// On the same thread, in pairs.
void push_override(bool enabled);
void pop_override();

}  // namespace powersgd
