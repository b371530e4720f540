// SPDX-License-Identifier: BSD-3-Clause
//
// A packet of one rank: what its groups stand for, and what the rank keeps.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "support/dtypes.h"
#include "support/packet_reference.h"
#include "support/packet_test.h"

namespace powersgd::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

class Packets : public PacketTest {
 protected:
  // Quantizes a payload of one rank, or of the first of several owners, and checks every group.
  void expect_quantized_payload(TestPackets& rank, const Values& values) {
    rank.payload->set(values);
    const Values exact = plus_rounding(rank, rank.payload->get());
    const Values before = rank.kept();
    rank.run(PacketStage::kQuantize);
    const Values sent = rank.values_sent();
    for_each_group(rank, [&](const PacketGroup& group, WireDType dtype) {
      expect_quantized(dtype, values_at(exact, group), values_at(sent, group));
    });
    EXPECT_EQ(rank.kept(), expected_kept(rank, exact, sent, before));
  }

  // Returns a payload with the rounding of its raw elements added.
  Values plus_rounding(const TestPackets& rank, Values values) const {
    if (rank.packets.drop_residual) return values;
    const Values kept = rank.kept();
    for (auto i = rank.packets.raw_offset; i < rank.counts_offset(); ++i) {
      const auto element = static_cast<size_t>(i);
      values[element] = round_to(spec().factor_dtype, values[element] + kept[element]);
    }
    return values;
  }

  Values expected_kept(const TestPackets& rank, const Values& exact, const Values& sent,
                       Values kept) const {
    for_each_group(rank, [&](const PacketGroup& group, WireDType) {
      if (!group.is_raw && !spec().is_q) return;
      for (const size_t i : group.elements) {
        const double value =
            group.is_raw ? round_to(spec().factor_dtype, exact[i] - sent[i]) : sent[i];
        if (group.is_raw && rank.packets.drop_residual) kept[i] = 0;
        if (std::isfinite(value)) kept[i] = value;
      }
    });
    return kept;
  }
};

TEST_P(Packets, QuantizeRoundsEveryGroup) {
  for (const Exchange& exchange : {Exchange{}, {3, true}, {9, true}}) {
    TestPackets rank(*runner_, spec(), exchange);
    expect_quantized_payload(rank, wide_values(rank.numel(), 1));
  }
}

// The values of each step differ by far from those of the step before.
TEST_P(Packets, TheRoundingOfRawSegmentsIsSentLater) {
  TestPackets rank(*runner_, spec(), {});
  Values total(static_cast<size_t>(rank.numel())), total_sent = total, magnitude = total;
  for (uint64_t step = 0; step < 5; ++step) {
    rank.packets.drop_residual = step == 1;
    if (step == 1) total = total_sent = magnitude = Values(total.size());
    const Values values = wide_values(rank.numel(), step);
    expect_quantized_payload(rank, values);
    const Values exact = rank.payload->get(), sent = rank.values_sent();
    for (size_t i = 0; i < total.size(); ++i) {
      total[i] += exact[i];
      total_sent[i] += sent[i];
      magnitude[i] += std::fabs(exact[i]) + std::fabs(sent[i]);
    }
  }
  const Values kept = rank.kept();
  // Each step rounds twice in the factor dtype. One sum of magnitudes bounds what it rounds.
  const double tolerance = 16 * unit_roundoff(spec().factor_dtype);
  for (auto i = rank.packets.raw_offset; i < rank.counts_offset(); ++i) {
    const auto j = static_cast<size_t>(i);
    EXPECT_NEAR(total_sent[j] + kept[j], total[j], tolerance * magnitude[j]) << j;
  }
}

TEST_P(Packets, AGroupOfZerosIsZeros) {
  TestPackets rank(*runner_, spec(), {});
  rank.set_kept(Values(static_cast<size_t>(rank.numel()), 0.0));
  expect_quantized_payload(rank, Values(static_cast<size_t>(rank.numel())));
  EXPECT_EQ(rank.values_sent(), Values(static_cast<size_t>(rank.numel())));
}

// From values whose scale would be below the smallest normal float, to the largest.
TEST_P(Packets, ValuesOfAllMagnitudes) {
  for (const double magnitude :
       {0x1p-149, 0x1p-140, 0x1p-126, 0x1p-124, 0x1.7p-120, 0x1.1p-119, 0x1p-112, 0x1p-111,
        0x1.8p-100, 0x1p100, 0x1.8p120, 0x1p127, 0x1.FFFFFEp127, 1e300}) {
    const bool is_double = spec().factor_dtype == DType::kFloat64;
    if (magnitude > largest(DType::kFloat32) && !is_double) continue;
    SCOPED_TRACE(::testing::Message() << "magnitude " << magnitude);
    TestPackets rank(*runner_, spec(), {});
    Values values(static_cast<size_t>(rank.numel()));
    for (size_t i = 0; i < values.size(); ++i) {
      const double part = 1 - static_cast<double>(i % 67) / 67;
      values[i] = (i % 2 == 0 ? magnitude : -magnitude) * part * part;
    }
    expect_quantized_payload(rank, values);
  }
}

// Halves of a step round to even codes: the scale is a power of two, and products are exact.
TEST_P(Packets, TiesGoToEven) {
  TestPackets rank(*runner_, spec(), {});
  for_each_group(rank, [&](const PacketGroup& group, WireDType dtype) {
    if (dtype != WireDType::kInt8 && dtype != WireDType::kInt4) return;
    const double most = dtype == WireDType::kInt8 ? 127 : 7;
    Values values(static_cast<size_t>(rank.numel()));
    values[group.elements[0]] = -4 * most;
    for (size_t i = 1; i < group.elements.size(); ++i) {
      values[group.elements[i]] = 4 * (std::fmod(static_cast<double>(i), most) - 0.5);
    }
    rank.payload->set(values);
    rank.run(PacketStage::kQuantize);
    const Values sent = rank.values_sent();
    for (const size_t i : group.elements) {
      EXPECT_EQ(sent[i], 4 * std::nearbyint(values[i] / 4)) << values[i];
    }
  });
}

TEST_P(Packets, AValueThatIsNotFiniteLeavesWhatIsKept) {
  for (const double value : {kInfinity, -kInfinity, kNaN}) {
    TestPackets rank(*runner_, spec(), {});
    const Values kept = wide_values(rank.numel(), 2);
    rank.set_kept(kept);
    Values values = wide_values(rank.numel(), 3);
    size_t number = 0;
    for_each_group(rank, [&](const PacketGroup& group, WireDType) {
      const size_t count = group.elements.size();
      if (++number % 3 == 0) values[group.elements[number % count]] = value;
    });
    expect_quantized_payload(rank, values);
    rank.packets.drop_residual = true;
    expect_quantized_payload(rank, values);
  }
}

TEST_P(Packets, FlagsAreOneWhereTheElementIsNotZero) {
  for (const Exchange& exchange : {Exchange{}, {2, true}, {5, true}}) {
    TestPackets rank(*runner_, spec(), exchange);
    Values values(static_cast<size_t>(rank.numel()));
    const Values flags = {0.25, 0, kNaN};
    std::copy(flags.begin(), flags.end(), values.end() - 3);
    rank.payload->set(values);
    rank.run(PacketStage::kQuantize);
    const Values sent = rank.values_sent();
    EXPECT_EQ(Values(sent.end() - 3, sent.end()), (Values{1, 0, 1}));
  }
}

// The scale of a group, by the bytes of the packet.
TEST_P(Packets, ScalesTravelAsBFloat16) {
  TestPackets rank(*runner_, spec(), {});
  rank.payload->set(wide_values(rank.numel(), 4));
  const Values exact = rank.payload->get();
  rank.run(PacketStage::kQuantize);
  const std::vector<uint8_t> bytes = rank.read(rank.packets.sent, rank.packets.layout.bytes());
  int64_t numbers[] = {0, 0};
  for_each_group(rank, [&](const PacketGroup& group, WireDType dtype) {
    const int64_t number = numbers[group.is_raw]++;
    const kernels::PacketLayout& layout = rank.packets.layout;
    const kernels::PacketSection& section = group.is_raw ? layout.raw : layout.factors;
    if (!has_scales(dtype)) return;
    const auto* scale = bytes.data() + section.scales_at + 2 * number;
    EXPECT_EQ(decode(DType::kBFloat16, {scale[0], scale[1]})[0],
              reference_scale(dtype, values_at(exact, group)));
  });
}

INSTANTIATE_TEST_SUITE_P(All, Packets, ::testing::ValuesIn(packet_cases()), packet_case_name);

}  // namespace
}  // namespace powersgd::test
