// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "powersgd/group/scope_override.h"

namespace powersgd::test {

// `with torch_powersgd.scope(...)`, from its construction to its destruction.
class ScopeBlock {
 public:
  explicit ScopeBlock(bool enabled) { push_override(enabled); }
  ~ScopeBlock() { pop_override(); }
  ScopeBlock(const ScopeBlock&) = delete;
  ScopeBlock& operator=(const ScopeBlock&) = delete;
};

}  // namespace powersgd::test
