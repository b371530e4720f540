// SPDX-License-Identifier: BSD-3-Clause
#include "powersgd/core/options.h"

#include <array>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

#include "powersgd/core/option_table.h"

namespace powersgd {
namespace {

template <typename Value>
[[noreturn]] void reject(const char* field, const char* allowed, const Value& value) {
  std::ostringstream message;
  message << field << " must be " << allowed << ", got " << value;
  throw std::invalid_argument(message.str());
}

std::string quoted(const std::string& text) { return "'" + text + "'"; }

template <typename Enum>
using Name = std::pair<Enum, const char*>;

constexpr std::array<Name<Scope>, 3> kScopes{
    {{Scope::kBackward, "backward"}, {Scope::kAttached, "attached"}, {Scope::kNever, "never"}}};

constexpr std::array<Name<DType>, 3> kDTypes{
    {{DType::kFloat32, "float32"}, {DType::kBFloat16, "bfloat16"}, {DType::kFloat16, "float16"}}};

constexpr std::array<Name<WireDType>, 3> kWireDTypes{
    {{WireDType::kBFloat16, "bfloat16"}, {WireDType::kInt8, "int8"}, {WireDType::kInt4, "int4"}}};

template <typename Enum, size_t kCount>
Enum parse(const std::array<Name<Enum>, kCount>& names, const std::string& name, const char* field,
           const char* allowed) {
  for (const auto& [value, known] : names) {
    if (name == known) return value;
  }
  reject(field, allowed, quoted(name));
}

template <typename Enum, size_t kCount>
std::string name_of(const std::array<Name<Enum>, kCount>& names, Enum value) {
  for (const auto& [known, name] : names) {
    if (value == known) return name;
  }
  return "unknown (" + std::to_string(static_cast<int32_t>(value)) + ")";
}

// Each overload returns the form of a value in messages.
template <typename Number>
Number shown(Number value) {
  return value;
}
std::string shown(Scope value) { return quoted(to_string(value)); }
std::string shown(DType value) { return to_string(value); }
std::string shown(std::optional<WireDType> value) { return value ? to_string(*value) : "None"; }
std::string shown(const std::string& value) { return quoted(value); }
std::string shown(const PatternRanks& value) {
  std::string text;
  for (const auto& [pattern, rank] : value) {
    text += (text.empty() ? "" : ", ") + quoted(pattern) + ": " + std::to_string(rank);
  }
  return "{" + text + "}";
}

bool matches(const char* pattern, const char* text) {
  for (; *pattern != '*'; ++pattern, ++text) {
    if (*pattern != *text) return false;
    if (*pattern == '\0') return true;
  }
  for (;; ++text) {
    if (matches(pattern + 1, text)) return true;
    if (*text == '\0') return false;
  }
}

}  // namespace

void validate(const Options& options) {
  for_each_option([&](const char* name, auto member, auto rule) {
    const auto& value = options.*member;
    const char* allowed = rule(value);
    if (allowed != nullptr) reject(name, allowed, shown(value));
  });
}

bool fits(const std::string& pattern, const std::string& name) {
  return matches(pattern.c_str(), name.c_str()) || matches(pattern.c_str(), ("." + name).c_str());
}

std::optional<int64_t> rank_of(const std::string& name, const PatternRanks& ranks) {
  for (const auto& [pattern, rank] : ranks) {
    if (fits(pattern, name)) return rank;
  }
  return std::nullopt;
}

Scope parse_scope(const std::string& name) {
  return parse(kScopes, name, "scope", rules::kScopeWords);
}

std::string to_string(Scope scope) { return name_of(kScopes, scope); }

DType parse_dtype(const std::string& name) {
  return parse(kDTypes, name, "residual dtype", rules::kResidualDTypeWords);
}

std::string to_string(DType dtype) { return name_of(kDTypes, dtype); }

int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return 4;
    case DType::kBFloat16:
    case DType::kFloat16:
      return 2;
  }
  reject("dtype", "float32, bfloat16 or float16", to_string(dtype));
}

WireDType parse_wire_dtype(const std::string& name) {
  return parse(kWireDTypes, name, "wire dtype", rules::kWireDTypeWords);
}

std::string to_string(WireDType dtype) { return name_of(kWireDTypes, dtype); }

}  // namespace powersgd
