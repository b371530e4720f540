// SPDX-License-Identifier: BSD-3-Clause
#include "support/packet_test.h"

#include <cmath>

namespace powersgd::test {

std::vector<PacketSpec> packet_specs() {
  const std::vector<Part> parts = {Part::raw(7),  {63, 1, 1},     {0, 5, 0},      {65, 64, 3},
                                   Part::raw(65), {1000, 130, 8}, Part::raw(131), {64, 200, 33},
                                   {6, 0, 0},     Part::raw(0),   {1, 1, 1}};
  std::vector<PacketSpec> specs;
  for (const WireDType wire : {WireDType::kInt8, WireDType::kInt4, WireDType::kBFloat16,
                               WireDType::kFloat16, WireDType::kFloat32}) {
    for (const DType factor : {DType::kFloat32, DType::kFloat64}) {
      for (const bool is_q : {false, true}) {
        PacketSpec spec{parts, is_q, factor, factor, wire};
        // The Q payload has no raw elements in training. Here it has some, in bfloat16.
        if (is_q && factor == DType::kFloat32) spec.raw_dtype = DType::kBFloat16;
        spec.misalignment = static_cast<int64_t>(specs.size() % 3);
        specs.push_back(spec);
      }
    }
  }
  return specs;
}

std::vector<PacketCase> packet_cases() {
  std::vector<PacketCase> cases;
  for (const RunnerFactory& runner : stage_runners()) {
    for (const PacketSpec& spec : packet_specs()) cases.push_back({runner, spec});
  }
  return cases;
}

std::string packet_case_name(const ::testing::TestParamInfo<PacketCase>& info) {
  return info.param.runner.name + "_" + describe(info.param.spec);
}

Values wide_values(int64_t count, uint64_t seed) {
  Values values = random_values(count, seed);
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = std::ldexp(values[i], static_cast<int>((i / 40 + seed) % 9) * 3 - 12);
  }
  return values;
}

Values values_at(const Values& payload, const PacketGroup& group) {
  Values values;
  for (const size_t i : group.elements) values.push_back(payload[i]);
  return values;
}

}  // namespace powersgd::test
