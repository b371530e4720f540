// SPDX-License-Identifier: BSD-3-Clause
#include "powersgd/options.h"

#include <array>
#include <cmath>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

namespace powersgd {
namespace {

template <typename Value>
[[noreturn]] void reject(const char* field, const char* allowed, const Value& value) {
  std::ostringstream message;
  message << std::boolalpha << field << " must be " << allowed << ", got " << value;
  throw std::invalid_argument(message.str());
}

template <typename Value>
void check(bool valid, const char* field, const char* allowed, const Value& value) {
  if (!valid) reject(field, allowed, value);
}

template <typename Enum>
using Name = std::pair<Enum, const char*>;

constexpr std::array<Name<Scope>, 4> kScopes{{{Scope::kBackward, "backward"},
                                              {Scope::kAttached, "attached"},
                                              {Scope::kAlways, "always"},
                                              {Scope::kNever, "never"}}};

constexpr std::array<Name<DType>, 4> kDTypes{{{DType::kFloat32, "float32"},
                                              {DType::kFloat64, "float64"},
                                              {DType::kBFloat16, "bfloat16"},
                                              {DType::kFloat16, "float16"}}};

template <typename Enum, size_t kCount>
Enum parse(const std::array<Name<Enum>, kCount>& names, const std::string& name, const char* field,
           const char* allowed) {
  for (const auto& [value, known] : names) {
    if (name == known) return value;
  }
  reject(field, allowed, "'" + name + "'");
}

template <typename Enum, size_t kCount>
std::string name_of(const std::array<Name<Enum>, kCount>& names, Enum value) {
  for (const auto& [known, name] : names) {
    if (value == known) return name;
  }
  return "unknown (" + std::to_string(static_cast<int32_t>(value)) + ")";
}

}  // namespace

void validate(const Options& options) {
  const int64_t rank = options.matrix_approximation_rank;
  check(rank >= 1, "matrix_approximation_rank", "an integer >= 1", rank);
  check(rank <= kMaxRank, "matrix_approximation_rank",
        ("an integer <= " + std::to_string(kMaxRank)).c_str(), rank);
  check(options.start_powerSGD_iter >= 0, "start_powerSGD_iter", "an integer >= 0",
        options.start_powerSGD_iter);
  const double rate = options.min_compression_rate;
  check(std::isfinite(rate) && rate > 0, "min_compression_rate", "a finite number > 0", rate);
  const double epsilon = options.orthogonalization_epsilon;
  check(epsilon >= 0 && epsilon < 1, "orthogonalization_epsilon", "a number >= 0 and < 1", epsilon);
  check(options.random_seed >= 0, "random_seed", "an integer >= 0", options.random_seed);
  check(options.compression_stats_logging_frequency >= 1, "compression_stats_logging_frequency",
        "an integer >= 1", options.compression_stats_logging_frequency);

  parse_scope(to_string(options.scope));
  check(options.min_numel >= 1, "min_numel", "an integer >= 1", options.min_numel);
  check(!options.inner.empty(), "inner", "'auto' or the name of a backend", "''");
  check(options.wire_dtype != DType::kFloat64, "wire_dtype",
        "None, float32, bfloat16 or float16 (None sends float64 gradients in float64)",
        to_string(DType::kFloat64));
  const DType residual = options.residual_dtype;
  check(residual == DType::kFloat32 || residual == DType::kBFloat16 || residual == DType::kFloat16,
        "residual_dtype",
        "float32, bfloat16 or float16 (float64 gradients keep a float64 residual)",
        to_string(residual));
  check(options.check_every >= 0, "check_every", "an integer >= 0", options.check_every);
  check(!options.alternating || options.warm_start, "alternating", "False without warm_start",
        "True");
}

Scope parse_scope(const std::string& name) {
  return parse(kScopes, name, "scope", "'backward', 'attached', 'always' or 'never'");
}

std::string to_string(Scope scope) { return name_of(kScopes, scope); }

DType parse_dtype(const std::string& name) {
  return parse(kDTypes, name, "dtype", "'float32', 'float64', 'bfloat16' or 'float16'");
}

std::string to_string(DType dtype) { return name_of(kDTypes, dtype); }

int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return 4;
    case DType::kFloat64:
      return 8;
    case DType::kBFloat16:
    case DType::kFloat16:
      return 2;
  }
  reject("dtype", "float32, float64, bfloat16 or float16", to_string(dtype));
}

}  // namespace powersgd
