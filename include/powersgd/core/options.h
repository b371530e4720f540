// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace powersgd {

enum class DType : int32_t { kFloat32, kBFloat16, kFloat16 };

// The dtypes in which the factors of a packet may travel.
enum class WireDType : int32_t { kBFloat16, kInt8, kInt4 };

constexpr int64_t kMaxRank = 1024;  // The largest matrix_approximation_rank.

// The all-reduces that may be compressed. The inner backend gets all others unchanged.
enum class Scope : int32_t {
  kBackward,  // attached buckets; where nothing was attached, large flat tensors in backward
  kAttached,  // attached buckets only
  kNever,     // nothing
};

// The matrix ranks of the parameters whose names have a pattern, in which a star stands for any
// characters; 0: sent whole. Of several patterns that fit, the first counts.
using PatternRanks = std::vector<std::pair<std::string, int64_t>>;

// The configuration of one process group or of what was attached. The names of the first block are
// those of torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook.PowerSGDState.
// torch_powersgd.Options documents the fields. Each field has a row in option_table.h.
struct Options {
  int64_t matrix_approximation_rank = 16;
  int64_t start_powerSGD_iter = 10;
  double min_compression_rate = 2;
  bool use_error_feedback = true;
  bool warm_start = true;
  double orthogonalization_epsilon = 0;
  int64_t random_seed = 0;
  int64_t compression_stats_logging_frequency = 10'000;

  Scope scope = Scope::kBackward;
  int64_t min_numel = int64_t{1} << 17;
  std::string inner = "auto";
  std::optional<WireDType> wire_dtype = WireDType::kInt8;
  DType residual_dtype = DType::kFloat32;
  int64_t check_every = 0;
  bool allow_discard = false;
  PatternRanks matrix_ranks;
};

// Throws std::invalid_argument that names the first bad field, its value and what is allowed. Some
// values are invalid only in combination. No other function validates options; every other layer
// assumes that they are valid.
void validate(const Options& options);

// True if the name has the pattern. A pattern that begins with "*." also fits a name without a dot.
bool fits(const std::string& pattern, const std::string& name);
// The rank of the first pattern that the name has, if any.
std::optional<int64_t> rank_of(const std::string& name, const PatternRanks& ranks);

// Python and the environment use these names: "backward", "attached", ... A function that reads an
// unknown name throws std::invalid_argument.
Scope parse_scope(const std::string& name);
std::string to_string(Scope scope);
DType parse_dtype(const std::string& name);  // "float32", "bfloat16", "float16"
std::string to_string(DType dtype);
int64_t size_of(DType dtype);                         // In bytes.
WireDType parse_wire_dtype(const std::string& name);  // "bfloat16", "int8", "int4"
std::string to_string(WireDType dtype);

}  // namespace powersgd
