// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "support/stage_runner.h"
#include "support/test_packets.h"

namespace powersgd::test {

struct PacketCase {
  RunnerFactory runner;
  PacketSpec spec;
};

inline std::ostream& operator<<(std::ostream& stream, const PacketCase& test_case) {
  return stream << test_case.runner.name << "_" << describe(test_case.spec);
}

// Payloads of P and of Q in every wire dtype, in float and in double.
// Their vectors end at, before and after the end of a group, and raw segments lie between them.
std::vector<PacketSpec> packet_specs();

// The same on every runner.
std::vector<PacketCase> packet_cases();
std::string packet_case_name(const ::testing::TestParamInfo<PacketCase>& info);

// Random values whose magnitude changes by powers of two, every few elements.
Values wide_values(int64_t count, uint64_t seed);

Values values_at(const Values& payload, const PacketGroup& group);

class PacketTest : public ::testing::TestWithParam<PacketCase> {
 protected:
  PacketTest() : runner_(GetParam().runner.make()) {}

  const PacketSpec& spec() const { return GetParam().spec; }

  // Calls body(group) for each group of a packet.
  template <class Body>
  void for_each_group(const TestPackets& rank, const Body& body) const {
    size_t number = 0;
    for (const PacketGroup& group : rank.groups()) {
      SCOPED_TRACE(::testing::Message() << "group " << number++);
      body(group);
    }
  }

  std::unique_ptr<StageRunner> runner_;
};

}  // namespace powersgd::test
