// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <limits>
#include <optional>
#include <stdexcept>
#include <string>

#include "powersgd/core/options.h"
#include "support/errors.h"

namespace powersgd {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// The error of the defaults with another value of a field.
template <class Field, class Value>
std::string error_with(Field Options::* field, Value value) {
  Options options;
  options.*field = value;
  return test::error_of([&] { validate(options); });
}

TEST(Options, DefaultsAreValid) {
  EXPECT_EQ(test::error_of([] { validate({}); }), "no error");
}

TEST(Options, RankIsFrom1To1024) {
  EXPECT_EQ(error_with(&Options::matrix_approximation_rank, 0),
            "matrix_approximation_rank must be an integer >= 1, got 0");
  EXPECT_EQ(error_with(&Options::matrix_approximation_rank, -3),
            "matrix_approximation_rank must be an integer >= 1, got -3");
  EXPECT_EQ(error_with(&Options::matrix_approximation_rank, 1025),
            "matrix_approximation_rank must be an integer <= 1024, got 1025");
  EXPECT_EQ(error_with(&Options::matrix_approximation_rank, 1024), "no error");
}

TEST(Options, MatrixRanksAreFrom0To1024) {
  EXPECT_EQ(error_with(&Options::matrix_ranks, PatternRanks{{"a", 0}, {"*.b", 1024}}), "no error");
  EXPECT_EQ(error_with(&Options::matrix_ranks, PatternRanks{{"a", 1}, {"*.b", 1025}}),
            "matrix_ranks must be names or patterns with an integer from 0 to 1024 each, got "
            "{'a': 1, '*.b': 1025}");
  EXPECT_NE(error_with(&Options::matrix_ranks, PatternRanks{{"a", -1}}), "no error");
  EXPECT_NE(error_with(&Options::matrix_ranks, PatternRanks{{"", 1}}), "no error");
}

TEST(Options, TheFirstPatternThatFitsANameCounts) {
  const PatternRanks ranks{{"blocks.1.*", 3}, {"*.mlp.weight", 4}, {"*.head", 0}, {"b*2*", 5}};
  EXPECT_EQ(rank_of("blocks.1.mlp.weight", ranks), 3);
  EXPECT_EQ(rank_of("blocks.10.mlp.weight", ranks), 4);
  EXPECT_EQ(rank_of("mlp.weight", ranks), 4);  // at the top of the model
  EXPECT_EQ(rank_of("head", ranks), 0);
  EXPECT_EQ(rank_of("ahead", ranks), std::nullopt);
  EXPECT_EQ(rank_of("b2", ranks), 5);
  EXPECT_EQ(rank_of("b12.2.c", ranks), 5);
  EXPECT_EQ(rank_of("b1", ranks), std::nullopt);
  EXPECT_EQ(rank_of("ab2", ranks), std::nullopt);
}

TEST(Options, StartIsNotNegative) {
  EXPECT_EQ(error_with(&Options::start_powerSGD_iter, -1),
            "start_powerSGD_iter must be an integer >= 0, got -1");
  EXPECT_EQ(error_with(&Options::start_powerSGD_iter, 0), "no error");
}

TEST(Options, CompressionRateIsPositiveAndFinite) {
  EXPECT_EQ(error_with(&Options::min_compression_rate, 0),
            "min_compression_rate must be a finite number > 0, got 0");
  EXPECT_EQ(error_with(&Options::min_compression_rate, kInfinity),
            "min_compression_rate must be a finite number > 0, got inf");
  EXPECT_EQ(error_with(&Options::min_compression_rate, kNaN),
            "min_compression_rate must be a finite number > 0, got nan");
  EXPECT_EQ(error_with(&Options::min_compression_rate, 0.5), "no error");
}

TEST(Options, EpsilonIsAShare) {
  EXPECT_EQ(error_with(&Options::orthogonalization_epsilon, 1),
            "orthogonalization_epsilon must be a number >= 0 and < 1, got 1");
  EXPECT_EQ(error_with(&Options::orthogonalization_epsilon, -0.5),
            "orthogonalization_epsilon must be a number >= 0 and < 1, got -0.5");
  EXPECT_EQ(error_with(&Options::orthogonalization_epsilon, kNaN),
            "orthogonalization_epsilon must be a number >= 0 and < 1, got nan");
}

TEST(Options, OtherIntegers) {
  EXPECT_EQ(error_with(&Options::random_seed, -1), "random_seed must be an integer >= 0, got -1");
  EXPECT_EQ(error_with(&Options::compression_stats_logging_frequency, 0),
            "compression_stats_logging_frequency must be an integer >= 1, got 0");
  EXPECT_EQ(error_with(&Options::min_numel, 0), "min_numel must be an integer >= 1, got 0");
}

TEST(Options, Names) {
  EXPECT_EQ(error_with(&Options::inner, ""),
            "inner must be 'auto' or the name of a backend, got ''");
  EXPECT_EQ(error_with(&Options::scope, static_cast<Scope>(9)),
            "scope must be 'backward', 'attached' or 'never', got 'unknown (9)'");
}

TEST(Options, DTypes) {
  EXPECT_EQ(error_with(&Options::residual_dtype, DType::kFloat16),
            "residual_dtype must be float32 or bfloat16, got float16");
  EXPECT_EQ(error_with(&Options::residual_dtype, DType::kBFloat16), "no error");
}

TEST(Options, WireDTypes) {
  EXPECT_EQ(error_with(&Options::wire_dtype, static_cast<WireDType>(9)),
            "wire_dtype must be None (float32), bfloat16, int8 or int4, got unknown (9)");
  for (const WireDType wire : {WireDType::kBFloat16, WireDType::kInt8, WireDType::kInt4}) {
    EXPECT_EQ(error_with(&Options::wire_dtype, wire), "no error");
  }
}

TEST(Options, CheckEveryIsNotNegative) {
  EXPECT_EQ(error_with(&Options::check_every, -1), "check_every must be an integer >= 0, got -1");
}

TEST(Options, ScopeNamesRoundTrip) {
  for (const char* name : {"backward", "attached", "never"}) {
    EXPECT_EQ(to_string(parse_scope(name)), name);
  }
  EXPECT_EQ(test::error_of([] { parse_scope("all"); }),
            "scope must be 'backward', 'attached' or 'never', got 'all'");
}

TEST(Options, DTypeNamesRoundTrip) {
  for (const char* name : {"float32", "bfloat16", "float16"}) {
    EXPECT_EQ(to_string(parse_dtype(name)), name);
  }
  EXPECT_EQ(test::error_of([] { parse_dtype("int8"); }),
            "residual dtype must be float32 or bfloat16, got 'int8'");
  EXPECT_EQ(size_of(DType::kFloat32), 4);
  EXPECT_EQ(size_of(DType::kBFloat16), 2);
  EXPECT_EQ(size_of(DType::kFloat16), 2);
}

TEST(Options, WireDTypeNamesRoundTrip) {
  for (const char* name : {"bfloat16", "int8", "int4"}) {
    EXPECT_EQ(to_string(parse_wire_dtype(name)), name);
  }
  EXPECT_EQ(test::error_of([] { parse_wire_dtype("float32"); }),
            "wire dtype must be None (float32), bfloat16, int8 or int4, got 'float32'");
}

TEST(Options, AnInvalidOneIsAnInvalidArgument) {
  Options options;
  options.min_numel = 0;
  EXPECT_THROW(validate(options), std::invalid_argument);
  EXPECT_THROW(parse_scope("all"), std::invalid_argument);
  EXPECT_THROW(parse_dtype("int8"), std::invalid_argument);
  EXPECT_THROW(parse_wire_dtype("float32"), std::invalid_argument);
}

}  // namespace
}  // namespace powersgd
