// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cmath>
#include <cstdint>
#include <optional>
#include <string>

#include "powersgd/core/options.h"

namespace powersgd {

// A rule returns nullptr for an allowed value, else the allowed values in words.
namespace rules {

inline const char* any(bool /*value*/) { return nullptr; }

inline const char* not_negative(int64_t value) { return value >= 0 ? nullptr : "an integer >= 0"; }

inline const char* positive(int64_t value) { return value >= 1 ? nullptr : "an integer >= 1"; }

inline const char* rank(int64_t value) {
  static_assert(kMaxRank == 1024, "the words below name it");
  return value <= kMaxRank ? positive(value) : "an integer <= 1024";
}

inline const char* rate(double value) {
  return std::isfinite(value) && value > 0 ? nullptr : "a finite number > 0";
}

inline const char* share(double value) {
  return value >= 0 && value < 1 ? nullptr : "a number >= 0 and < 1";
}

inline constexpr const char* kScopeWords = "'backward', 'attached' or 'never'";

inline const char* scope(Scope value) {
  return Scope::kBackward <= value && value <= Scope::kNever ? nullptr : kScopeWords;
}

inline const char* backend_name(const std::string& value) {
  return value.empty() ? "'auto' or the name of a backend" : nullptr;
}

inline constexpr const char* kWireDTypeWords = "None (float32), bfloat16, int8 or int4";

inline const char* wire_dtype(std::optional<WireDType> value) {
  const bool allowed = !value || (WireDType::kBFloat16 <= *value && *value <= WireDType::kInt4);
  return allowed ? nullptr : kWireDTypeWords;
}

inline constexpr const char* kResidualDTypeWords = "float32 or bfloat16";

inline const char* residual_dtype(DType value) {
  const bool allowed = value == DType::kFloat32 || value == DType::kBFloat16;
  return allowed ? nullptr : kResidualDTypeWords;
}

inline const char* matrix_ranks(const PatternRanks& value) {
  for (const auto& [pattern, of] : value) {
    const bool allowed = !pattern.empty() && (of == 0 || rank(of) == nullptr);
    if (!allowed) return "names or patterns with an integer from 0 to 1024 each";
  }
  return nullptr;
}

}  // namespace rules

// The table of options: it calls visit(name, member, rule) for every field, in the order of
// Options. Validation and the Python bindings are made from it. Tests compare the struct, this
// table, torch_powersgd.Options and the documentation.
template <typename Visit>
void for_each_option(const Visit& visit) {
  visit("matrix_approximation_rank", &Options::matrix_approximation_rank, rules::rank);
  visit("start_powerSGD_iter", &Options::start_powerSGD_iter, rules::not_negative);
  visit("min_compression_rate", &Options::min_compression_rate, rules::rate);
  visit("use_error_feedback", &Options::use_error_feedback, rules::any);
  visit("warm_start", &Options::warm_start, rules::any);
  visit("orthogonalization_epsilon", &Options::orthogonalization_epsilon, rules::share);
  visit("random_seed", &Options::random_seed, rules::not_negative);
  visit("compression_stats_logging_frequency", &Options::compression_stats_logging_frequency,
        rules::positive);
  visit("scope", &Options::scope, rules::scope);
  visit("min_numel", &Options::min_numel, rules::positive);
  visit("inner", &Options::inner, rules::backend_name);
  visit("wire_dtype", &Options::wire_dtype, rules::wire_dtype);
  visit("residual_dtype", &Options::residual_dtype, rules::residual_dtype);
  visit("check_every", &Options::check_every, rules::not_negative);
  visit("allow_discard", &Options::allow_discard, rules::any);
  visit("matrix_ranks", &Options::matrix_ranks, rules::matrix_ranks);
}

}  // namespace powersgd
