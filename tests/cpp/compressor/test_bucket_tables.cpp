// SPDX-License-Identifier: BSD-3-Clause
#include "compressor/bucket_tables.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>

#include "compressor/bucket_states.h"
#include "support/hook_defaults.h"

namespace powersgd {
namespace {

using Wire = std::optional<WireDType>;

// Returns the field of a bucket with one matrix.
bool has_bfloat16_products(const Wire& wire, at::ScalarType gradient_type = at::kFloat,
                           bool error_feedback = true) {
  Options options = test::compressing(1, wire);
  options.use_error_feedback = error_feedback;
  const BucketSpec spec{plan_bucket({{{40, 24}, {}}}, options), options, gradient_type, at::kCPU,
                        Ranks{}};
  BucketStates states({std::make_shared<ParameterState>()});
  states.allocate(spec);
  const PayloadPlans plans = plan_payloads(spec);
  const Payloads payloads{at::zeros({plans.p.numel}, spec.factor_options()),
                          at::zeros({plans.q.numel}, spec.factor_options())};
  const BucketTables tables(spec, states.of_matrices(), /*step_counter=*/nullptr,
                            Workspaces::of_one_bucket(), payloads);
  return tables.bucket().bfloat16_products;
}

TEST(BucketTables, ProductsMayBeRoundedWhereTheWireRoundsMore) {
  for (const Wire wire : {WireDType::kInt8, WireDType::kInt4, WireDType::kBFloat16}) {
    SCOPED_TRACE(test::name_of(wire));
    EXPECT_TRUE(has_bfloat16_products(wire));
    EXPECT_TRUE(has_bfloat16_products(wire, at::kBFloat16));
    EXPECT_FALSE(has_bfloat16_products(wire, at::kFloat, /*error_feedback=*/false));
  }
  EXPECT_FALSE(has_bfloat16_products(std::nullopt));
}

}  // namespace
}  // namespace powersgd
