// SPDX-License-Identifier: BSD-3-Clause
#include "powersgd/group/scope_override.h"

#include <c10/util/ThreadLocalDebugInfo.h>

#include <atomic>
#include <memory>

namespace powersgd {
namespace {

// torch 2.11's list of kinds is closed, and torch itself does not use this one. The type
// distinguishes this object from another library's of the same kind.
const c10::DebugInfoKind kKind = c10::DebugInfoKind::INFERENCE_CONTEXT;

struct OverrideInfo : c10::DebugInfoBase {
  explicit OverrideInfo(ScopeOverride value) : value(value) {}
  const ScopeOverride value;
};

}  // namespace

std::optional<ScopeOverride> current_override() {
  const auto* info = dynamic_cast<const OverrideInfo*>(c10::ThreadLocalDebugInfo::get(kKind));
  if (info == nullptr) return std::nullopt;
  return info->value;
}

void push_override(bool enabled) {
  static std::atomic<int64_t> blocks{0};
  c10::ThreadLocalDebugInfo::_push(
      kKind, std::make_shared<OverrideInfo>(ScopeOverride{enabled, ++blocks}));
}

void pop_override() { c10::ThreadLocalDebugInfo::_pop(kKind); }

}  // namespace powersgd
