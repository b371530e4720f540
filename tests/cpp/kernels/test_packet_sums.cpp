// SPDX-License-Identifier: BSD-3-Clause
//
// Packets of several ranks: both schedules, and what they leave with the owners of chunks.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/fixtures/dtypes.h"
#include "kernels/fixtures/packet_reference.h"
#include "kernels/fixtures/packet_test.h"
#include "kernels/fixtures/reference.h"

namespace powersgd::test {
namespace {

class PacketSums : public PacketTest {
 protected:
  AllPackets quantized(const Exchange& exchange) {
    AllPackets all = all_packets(*runner_, spec(), exchange);
    for (size_t rank = 0; rank < all.size(); ++rank) {
      all[rank]->set_payload(payload_of(rank, all[rank]->numel()));
      all[rank]->run(PacketStage::kQuantize);
    }
    return all;
  }

  Values payload_of(size_t rank, int64_t numel) const {
    Values values = wide_values(numel, 10 + rank);
    std::fill(values.end() - 3, values.end(), 0.0);
    return values;
  }

  std::vector<Values> values_sent(const AllPackets& all) const {
    std::vector<Values> sent;
    for (const auto& rank : all) sent.push_back(rank->values_sent());
    return sent;
  }

  std::vector<Values> q_locals(const AllPackets& all) const {
    std::vector<Values> q_locals;
    for (const auto& rank : all) q_locals.push_back(rank->q_local());
    return q_locals;
  }

  // Adds in the order of the ranks, and rounds every sum to float.
  Values in_rank_order(const std::vector<Values>& of_ranks) const {
    Values sums = of_ranks[0];
    for (size_t rank = 1; rank < of_ranks.size(); ++rank) {
      for (size_t i = 0; i < sums.size(); ++i) {
        sums[i] = round_to(DType::kFloat32, sums[i] + of_ranks[rank][i]);
      }
    }
    return sums;
  }

  // The sums of the raw elements. Two-shot sends them in the dtype of the elements.
  Values sent_sums(const AllPackets& all, const std::vector<Values>& of_ranks) const {
    Values sums = all[0]->raw_of(in_rank_order(of_ranks));
    if (all[0]->exchange.two_shot) {
      for (double& sum : sums) sum = round_to(spec().raw_dtype, sum);
    }
    return sums;
  }

  void expect_equal_payloads(const AllPackets& all) const {
    for (const auto& rank : all) EXPECT_EQ(rank->payload->bytes(), all[0]->payload->bytes());
  }

  // Each of a few additions in float rounds by its unit times the sum of magnitudes.
  double tolerance(const Exchange& exchange) const {
    return (exchange.ranks + 3) * unit_roundoff(DType::kFloat32);
  }
};

TEST_P(PacketSums, AGatherAddsInTheOrderOfTheRanks) {
  for (const int32_t ranks : {1, 2, 3, 9}) {
    const AllPackets all = quantized({ranks, false});
    const Values expected = in_rank_order(values_sent(all));
    const std::vector<Values> before = q_locals(all);
    sum(all);
    EXPECT_EQ(all[0]->payload->get(), expected) << ranks;
    expect_equal_payloads(all);
    EXPECT_EQ(q_locals(all), before);
  }
}

TEST_P(PacketSums, TwoShotRoundsTheSumOnce) {
  for (const int32_t ranks : {2, 3, 4, 9}) {
    const AllPackets all = quantized({ranks, true});
    const Values exact = in_rank_order(values_sent(all));
    sum(all);
    const Values rounded = all[0]->payload->get();
    for_each_group(*all[0], [&](const PacketGroup& group) {
      expect_quantized(spec().wire, values_at(exact, group), values_at(rounded, group));
    });
    expect_equal_payloads(all);
  }
}

class RawSums : public PacketSums {};

TEST_P(RawSums, AreAddedInTheOrderOfTheRanks) {
  for (const Exchange& exchange :
       {Exchange{2, false}, {9, false}, {2, true}, {3, true}, {9, true}}) {
    const AllPackets all = quantized(exchange);
    std::vector<Values> payloads;
    for (const auto& rank : all) payloads.push_back(rank->payload->get());
    sum(all);
    EXPECT_EQ(all[0]->raw_of(all[0]->payload->get()), sent_sums(all, payloads));
    expect_equal_payloads(all);
  }
}

// Chunks have as many as each other, and the last ones may have fewer or none.
TEST_P(RawSums, OfAnyNumberOfElements) {
  for (const int64_t count : {0, 1, 2, 8, 9, 10, 63, 65, 1000, 40'001}) {
    PacketSpec few = spec();
    few.parts = {{3, 5, 2}, Part::raw(count)};
    for (const Exchange& exchange : {Exchange{2, false}, {3, true}, {9, true}}) {
      SCOPED_TRACE(::testing::Message() << count << " elements, " << exchange.ranks << " ranks");
      const AllPackets all = all_packets(*runner_, few, exchange);
      std::vector<Values> payloads;
      for (size_t rank = 0; rank < all.size(); ++rank) {
        all[rank]->set_payload(payload_of(rank, all[rank]->numel()));
        payloads.push_back(all[rank]->payload->get());
        all[rank]->run(PacketStage::kQuantize);
      }
      sum(all);
      EXPECT_EQ(all[0]->raw_of(all[0]->payload->get()), sent_sums(all, payloads));
      expect_equal_payloads(all);
    }
  }
}

class LocalFactors : public PacketSums {};

TEST_P(LocalFactors, OfTheOwnerAloneTakeTheRoundingOfASum) {
  for (const int32_t ranks : {2, 3, 9}) {
    const AllPackets all = quantized({ranks, true});
    const Values exact = in_rank_order(values_sent(all));
    const std::vector<Values> before = q_locals(all);
    sum(all);
    const std::vector<Values> after = q_locals(all);
    const Values rounded = all[0]->payload->get();
    for_each_group(*all[0], [&](const PacketGroup& group) {
      for (const size_t i : group.elements) {
        for (size_t rank = 0; rank < all.size(); ++rank) {
          const double more = round_to(DType::kFloat32, rounded[i] - exact[i]);
          const double share = static_cast<int64_t>(rank) == group.owner ? more : 0;
          EXPECT_EQ(after[rank][i], round_to(DType::kFloat32, before[rank][i] + share))
              << "rank " << rank << ", element " << i;
        }
      }
    });
  }
}

TEST_P(LocalFactors, AddUpToQ) {
  for (const Exchange& exchange : {Exchange{1, false}, {4, false}, {2, true}, {9, true}}) {
    const AllPackets all = quantized(exchange);
    const std::vector<Values> q_sent = q_locals(all);
    sum(all);
    const Values q = all[0]->payload->get();
    const std::vector<Values> q_local = q_locals(all);
    for (size_t i = 0; i < static_cast<size_t>(all[0]->packets.raw_offset); ++i) {
      double total = 0, magnitude = std::fabs(q[i]);
      for (size_t rank = 0; rank < all.size(); ++rank) {
        total += q_local[rank][i];
        magnitude += std::fabs(q_sent[rank][i]) + std::fabs(q_local[rank][i]);
      }
      EXPECT_NEAR(total, q[i], tolerance(exchange) * magnitude) << i;
    }
  }
}

TEST_P(PacketSums, FlagsOfAnyRankReachAll) {
  for (const Exchange& exchange : {Exchange{3, false}, {3, true}, {9, true}}) {
    const AllPackets all = all_packets(*runner_, spec(), exchange);
    for (size_t rank = 0; rank < all.size(); ++rank) {
      Values values(static_cast<size_t>(all[rank]->numel()));
      values.end()[-3] = rank == 1 ? 2 : 0;
      values.end()[-1] = rank < 2 ? 1 : 0;
      all[rank]->set_payload(values);
      all[rank]->run(PacketStage::kQuantize);
    }
    sum(all);
    const Values sums = all[0]->payload->get();
    EXPECT_EQ(Values(sums.end() - 3, sums.end()), (Values{1, 0, exchange.two_shot ? 1.0 : 2.0}));
    expect_equal_payloads(all);
  }
}

// A value of one rank that is not finite reaches all of them, and their q_local stay finite.
TEST_P(PacketSums, AValueThatIsNotFiniteReachesAll) {
  for (const Exchange& exchange : {Exchange{3, false}, {3, true}}) {
    const AllPackets all = all_packets(*runner_, spec(), exchange);
    const auto raw = static_cast<size_t>(all[0]->packets.raw_offset) + 100;
    for (size_t rank = 0; rank < all.size(); ++rank) {
      Values values = payload_of(rank, all[rank]->numel());
      for_each_group(*all[rank], [&](const PacketGroup& group) {
        if (rank == 2) values[group.elements.back()] = kInfinity;
      });
      if (rank == 2) values[raw] = kInfinity;
      all[rank]->set_payload(values);
      all[rank]->run(PacketStage::kQuantize);
    }
    sum(all);
    const Values sums = all[1]->payload->get();
    for_each_group(*all[0], [&](const PacketGroup& group) {
      EXPECT_FALSE(std::isfinite(sums[group.elements.back()]));
    });
    EXPECT_EQ(sums[raw], kInfinity);
    for (const Values& values : q_locals(all)) {
      EXPECT_EQ(finite(values), values);
    }
  }
}

// Sums beyond the range of float: q_local stays finite.
TEST_P(PacketSums, ASumMayOverflow) {
  const AllPackets all = all_packets(*runner_, spec(), {2, true});
  for (const auto& rank : all) {
    Values values(static_cast<size_t>(rank->numel()), 3e38);
    rank->set_payload(values);
    rank->run(PacketStage::kQuantize);
  }
  const Values exact = in_rank_order(values_sent(all));
  sum(all);
  const Values sums = all[0]->payload->get();
  for_each_group(*all[0], [&](const PacketGroup& group) {
    expect_quantized(spec().wire, values_at(exact, group), values_at(sums, group));
  });
  EXPECT_EQ(all[0]->raw_of(sums), all[0]->raw_of(exact));
  for (const Values& values : q_locals(all)) {
    EXPECT_EQ(finite(values), values);
  }
}

template <class Matches>
std::vector<PacketSpec> specs_that(const Matches& matches) {
  std::vector<PacketSpec> specs;
  for (const PacketSpec& spec : packet_specs()) {
    if (matches(spec)) specs.push_back(spec);
  }
  return specs;
}

POWERSGD_INSTANTIATE(PacketSums, packet_specs());
POWERSGD_INSTANTIATE(LocalFactors, specs_that([](const PacketSpec& spec) { return spec.is_q; }));
// Raw elements travel as they are, whatever the wire dtype of the factors.
POWERSGD_INSTANTIATE(RawSums, specs_that([](const PacketSpec& spec) {
                       return spec.wire == WireDType::kInt8;
                     }));

// All that two-shot writes, with what a step leaves for the next one.
std::vector<uint8_t> two_steps(const RunnerFactory& factory, const PacketSpec& spec) {
  const std::unique_ptr<StageRunner> runner = factory.make();
  const AllPackets all = all_packets(*runner, spec, {3, true});
  std::vector<uint8_t> bytes;
  for (uint64_t step = 0; step < 2; ++step) {
    for (size_t rank = 0; rank < all.size(); ++rank) {
      all[rank]->set_payload(wide_values(all[rank]->numel(), 30 * step + rank));
      all[rank]->run(PacketStage::kQuantize);
    }
    sum(all);
  }
  for (const auto& rank : all) {
    const std::vector<uint8_t> payload = rank->payload->bytes();
    const std::vector<uint8_t> q_local = encode(DType::kFloat32, rank->q_local());
    bytes.insert(bytes.end(), payload.begin(), payload.end());
    bytes.insert(bytes.end(), q_local.begin(), q_local.end());
  }
  return bytes;
}

TEST(PacketSums, AreTheSameOnAnyNumberOfThreadsAndAnyInstructionSet) {
  bool is_q = false;
  for (const WireDType wire : {WireDType::kInt8, WireDType::kInt4, WireDType::kBFloat16}) {
    is_q = !is_q;
    // Enough groups for several threads, of P or of Q.
    const PacketSpec spec{
        {{40'001, 300, 1}, {200, 7000, 5}, Part::raw(20'000)}, is_q, DType::kFloat32, wire};
    std::vector<std::vector<RunnerFactory>> groups = runners_equal_in_all_stages();
    groups.push_back(runners_equal_in_shared_stages());
    for (const std::vector<RunnerFactory>& group : groups) {
      const std::vector<uint8_t> expected = two_steps(group[0], spec);
      for (size_t i = 1; i < group.size(); ++i) {
        EXPECT_TRUE(two_steps(group[i], spec) == expected)
            << group[i].name << "_" << describe(spec);
      }
    }
  }
}

}  // namespace
}  // namespace powersgd::test
