// SPDX-License-Identifier: BSD-3-Clause
//
// A packet of one rank: what its groups stand for, and what the rank keeps.
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <vector>

#include "kernels/fixtures/dtypes.h"
#include "kernels/fixtures/packet_reference.h"
#include "kernels/fixtures/packet_test.h"

namespace powersgd::test {
namespace {

class Packets : public PacketTest {
 protected:
  // Quantizes a payload of one rank, or of the first of several owners, and checks every group.
  void expect_quantized_payload(DevicePackets& rank, const Values& values) {
    rank.set_payload(values);
    const Values exact = rank.payload->get();
    const Values before = rank.q_local();
    rank.run(PacketStage::kQuantize);
    const Values sent = rank.values_sent();
    for_each_group(rank, [&](const PacketGroup& group) {
      expect_quantized(spec().wire, values_at(exact, group), values_at(sent, group));
    });
    EXPECT_EQ(rank.q_local(), expected_q_local(rank, sent, before));
  }

  Values expected_q_local(const DevicePackets& rank, const Values& sent, Values q_local) const {
    if (!spec().is_q) return q_local;
    for_each_group(rank, [&](const PacketGroup& group) {
      for (const size_t i : group.elements) {
        if (std::isfinite(sent[i])) q_local[i] = sent[i];
      }
    });
    return q_local;
  }
};

TEST_P(Packets, QuantizeRoundsEveryGroup) {
  for (const Exchange& exchange : {Exchange{}, {3, true}, {9, true}}) {
    DevicePackets rank(*runner_, spec(), exchange);
    expect_quantized_payload(rank, wide_values(rank.numel(), 1));
  }
}

TEST_P(Packets, RawElementsTravelAsTheyAre) {
  const double tiny = 0x1p-149;
  const double huge = largest(DType::kFloat32);
  for (const Exchange& exchange : {Exchange{}, {3, true}, {9, true}}) {
    DevicePackets rank(*runner_, spec(), exchange);
    Values values = wide_values(rank.numel(), 5);
    for (size_t i = 0; i < values.size(); i += 7) {
      values[i] = (i % 2 == 0 ? 1 : -1) * (i % 3 == 0 ? tiny : i % 3 == 1 ? huge : kInfinity);
    }
    rank.set_payload(values);
    const Values exact = rank.payload->get();
    rank.run(PacketStage::kQuantize);
    EXPECT_EQ(rank.raw_of(rank.values_sent()), rank.raw_of(exact));
  }
}

TEST_P(Packets, AGroupOfZerosIsZeros) {
  DevicePackets rank(*runner_, spec(), {});
  expect_quantized_payload(rank, Values(static_cast<size_t>(rank.numel())));
  EXPECT_EQ(rank.values_sent(), Values(static_cast<size_t>(rank.numel())));
}

// From values whose scale would be below the smallest normal float, to the largest.
TEST_P(Packets, ValuesOfAllMagnitudes) {
  for (const double magnitude :
       {0x1p-149, 0x1p-140, 0x1p-126, 0x1p-124, 0x1.7p-120, 0x1.1p-119, 0x1p-112, 0x1p-111,
        0x1.8p-100, 0x1p100, 0x1.8p120, 0x1p127, 0x1.FFFFFEp127}) {
    SCOPED_TRACE(::testing::Message() << "magnitude " << magnitude);
    DevicePackets rank(*runner_, spec(), {});
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
  DevicePackets rank(*runner_, spec(), {});
  if (spec().wire != WireDType::kInt8 && spec().wire != WireDType::kInt4) return;
  const double most = spec().wire == WireDType::kInt8 ? 127 : 7;
  Values values(static_cast<size_t>(rank.numel()));
  for_each_group(rank, [&](const PacketGroup& group) {
    values[group.elements[0]] = -4 * most;
    for (size_t i = 1; i < group.elements.size(); ++i) {
      values[group.elements[i]] = 4 * (std::fmod(static_cast<double>(i), most) - 0.5);
    }
  });
  rank.set_payload(values);
  rank.run(PacketStage::kQuantize);
  const Values sent = rank.values_sent();
  for_each_group(rank, [&](const PacketGroup& group) {
    for (const size_t i : group.elements) {
      EXPECT_EQ(sent[i], 4 * std::nearbyint(values[i] / 4)) << values[i];
    }
  });
}

TEST_P(Packets, AValueThatIsNotFiniteLeavesQLocal) {
  for (const double value : {kInfinity, -kInfinity, kNaN}) {
    DevicePackets rank(*runner_, spec(), {});
    rank.set_q_local(wide_values(rank.numel(), 2));
    Values values = wide_values(rank.numel(), 3);
    size_t number = 0;
    for_each_group(rank, [&](const PacketGroup& group) {
      const size_t count = group.elements.size();
      if (++number % 3 == 0) values[group.elements[number % count]] = value;
    });
    expect_quantized_payload(rank, values);
  }
}

// The payload is not this rank's own Q.
TEST_P(Packets, OfAHostsSumAddTheRoundingToQLocal) {
  DevicePackets rank(*runner_, spec(), {});
  rank.packets.of_host = true;
  rank.set_q_local(wide_values(rank.numel(), 2));
  const Values before = rank.q_local();
  Values values = wide_values(rank.numel(), 3);
  values[0] = kInfinity;
  rank.set_payload(values);
  const Values exact = rank.payload->get();
  rank.run(PacketStage::kQuantize);
  const Values sent = rank.values_sent(), after = rank.q_local();
  for_each_group(rank, [&](const PacketGroup& group) {
    for (const size_t i : group.elements) {
      const double rounding = round_to(DType::kFloat32, sent[i] - exact[i]);
      const bool changes = spec().is_q && std::isfinite(rounding);
      EXPECT_EQ(after[i], changes ? round_to(DType::kFloat32, before[i] + rounding) : before[i]);
    }
  });
}

TEST_P(Packets, FlagsAreOneWhereTheElementIsNotZero) {
  for (const Exchange& exchange : {Exchange{}, {2, true}, {5, true}}) {
    DevicePackets rank(*runner_, spec(), exchange);
    Values values(static_cast<size_t>(rank.numel()));
    const Values flags = {0.25, 0, kNaN};
    std::copy(flags.begin(), flags.end(), values.end() - 3);
    rank.set_payload(values);
    rank.run(PacketStage::kQuantize);
    const Values sent = rank.values_sent();
    EXPECT_EQ(Values(sent.end() - 3, sent.end()), (Values{1, 0, 1}));
  }
}

// The scale of a group, by the bytes of the packet.
TEST_P(Packets, ScalesTravelAsBFloat16) {
  DevicePackets rank(*runner_, spec(), {});
  rank.set_payload(wide_values(rank.numel(), 4));
  const Values exact = rank.payload->get();
  rank.run(PacketStage::kQuantize);
  const std::vector<uint8_t> bytes = rank.read(rank.packets.sent, rank.packets.layout.bytes());
  if (!has_scales(spec().wire)) return;
  const auto* scale = bytes.data() + rank.packets.layout.factors.scales_at;
  for_each_group(rank, [&](const PacketGroup& group) {
    EXPECT_EQ(decode(DType::kBFloat16, {scale[0], scale[1]})[0],
              reference_scale(spec().wire, values_at(exact, group)));
    scale += 2;
  });
}

POWERSGD_INSTANTIATE(Packets, packet_specs());

}  // namespace
}  // namespace powersgd::test
