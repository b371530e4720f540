// SPDX-License-Identifier: BSD-3-Clause
#include "powersgd/compressor/traffic.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "compressor/payloads.h"
#include "powersgd/compressor/compressor.h"
#include "support/hook_defaults.h"

namespace powersgd {
namespace {

using Wire = std::optional<WireDType>;

// 130 x 70 and 40 x 300 are compressed. 9 elements are raw.
BucketPlan make_plan(const Options& options) {
  return plan_bucket({{{130, 70}, {}}, {{9}, {}}, {{40, 300}, {}}}, options);
}

constexpr int64_t kPayloadNumel = 3 * (130 + 40) + 9 + 2 + 1 + 3 * (70 + 300);

TEST(Traffic, FactorsTravelAsTheyAre) {
  const Options options = test::compressing(3, std::nullopt);
  for (const int32_t ranks : {1, 2, 3, 4, 9}) {
    const auto [p, q] = traffic_of(make_plan(options), options, at::kFloat, {0, ranks});
    EXPECT_EQ(p.schedule, Schedule::kAllreduce);
    EXPECT_EQ(p.payload_bytes + q.payload_bytes, 4 * kPayloadNumel);
    EXPECT_EQ(p.sent_bytes, 2 * (ranks - 1) * p.payload_bytes / ranks);
  }
}

TEST(Traffic, IsThatOfTheCompressor) {
  for (const Wire wire :
       {Wire(), Wire(WireDType::kBFloat16), Wire(WireDType::kInt8), Wire(WireDType::kInt4)}) {
    const Options options = test::compressing(3, wire);
    const BucketPlan plan = make_plan(options);
    for (const int32_t ranks : {1, 2, 9}) {
      const auto [p, q] = traffic_of(plan, options, at::kFloat, {0, ranks});
      const std::vector<ParameterStatePtr> states{std::make_shared<ParameterState>(0),
                                                  std::make_shared<ParameterState>(1)};
      const auto compressor =
          make_compressor(plan, states, options, at::kFloat, at::kCPU, {0, ranks});
      EXPECT_EQ(p.payload_bytes + q.payload_bytes, compressor->payload_bytes());
    }
  }
}

// What leaves a host of two levels is what a rank with a host of its own sends.
TEST(Traffic, OfAHostIsThatOfARank) {
  for (const int devices : {2, 8}) {
    for (const int hosts : {2, 4}) {
      std::vector<int> host_of;
      for (int rank = 0; rank < hosts * devices; ++rank) host_of.push_back(rank / devices);
      const int32_t size = hosts * devices;
      const auto levels = levels_of(host_of, 0);
      const auto traffic = [&](int64_t rows, const Ranks& ranks) {
        const Options options = test::compressing(3, WireDType::kInt8);
        return traffic_of(plan_bucket({{{rows, 200}, {}}}, options), options, at::kFloat, ranks).p;
      };
      const Traffic two = traffic(300'000, {0, size, false, {}, levels});
      EXPECT_TRUE(two.two_levels);
      const Traffic one = traffic(300'000, {0, hosts, false});
      EXPECT_EQ(two.schedule, one.schedule);
      EXPECT_GE(two.sent_bytes, one.sent_bytes);
      EXPECT_LT(two.sent_bytes - one.sent_bytes, 256 * size) << "more than padding";
      // One exchange of small packets: each rank of a host sends to each of the others.
      const Traffic small = traffic(100, {0, size, false, {}, levels});
      EXPECT_EQ(small.two_levels,
                small.payload_bytes * (devices * devices - 1) * (hosts - 1) > 65536);
      if (!small.two_levels) {
        EXPECT_EQ(small.sent_bytes, devices * devices * (hosts - 1) * small.payload_bytes);
      }
    }
  }
}

TEST(Traffic, PacketsAreGatheredWhileThatSendsLittleMore) {
  for (const int64_t rows : {100, 100'000}) {
    Options options = test::compressing(3, WireDType::kInt8);
    const BucketPlan plan = plan_bucket({{{rows, 200}, {}}}, options);
    for (const int64_t ranks : {2, 3, 4, 9}) {
      const Traffic p = traffic_of(plan, options, at::kFloat, {0, static_cast<int32_t>(ranks)}).p;
      const bool one_shot = ranks == 2 || rows == 100;
      EXPECT_EQ(to_string(p.schedule), one_shot ? "one-shot" : "two-shot") << rows << " " << ranks;
      EXPECT_EQ(p.sent_bytes, one_shot ? (ranks - 1) * p.payload_bytes
                                       : 2 * (ranks - 1) * p.payload_bytes / ranks);
    }
  }
}

// The groups are counted by hand: vectors of 130, 40, 70 and 300 elements have 3, 1, 2 and 5.
TEST(Traffic, ContentIsWithoutCountsAndPadding) {
  constexpr int64_t kGroups = 3 * (3 + 1 + 2 + 5);
  const auto content = [](Wire wire) {
    const Options options = test::compressing(3, wire);
    return content_bytes(make_plan(options), options, at::kFloat);
  };
  EXPECT_EQ(content(std::nullopt), 4 * (kPayloadNumel - 3));
  EXPECT_EQ(content(WireDType::kBFloat16), 2 * 64 * kGroups + 4 * 9);  // 9 elements in float32
  EXPECT_EQ(content(WireDType::kInt8), (64 + 2) * kGroups + 4 * 9);
  EXPECT_EQ(content(WireDType::kInt4), (32 + 2) * kGroups + 4 * 9);
}

TEST(Traffic, ContentOfExactGradientsIsAllOfThem) {
  const Options options = test::compressing(3, WireDType::kInt8);
  const BucketPlan plan = plan_bucket({{{130, 70}, {}, true}, {{9}, {}, true}}, options);
  EXPECT_EQ(content_bytes(plan, options, at::kDouble), 8 * (130 * 70 + 9));
}

TEST(Schedule, FollowsFromTheSize) {
  const auto schedule = [](int32_t ranks, int64_t bytes) { return choose_schedule(ranks, bytes); };
  for (const int64_t bytes : {int64_t{64}, int64_t{1} << 40}) {
    EXPECT_EQ(schedule(1, bytes), Schedule::kOneShot);
    EXPECT_EQ(schedule(2, bytes), Schedule::kOneShot);
  }
  // W ranks send (W - 1) (W - 2) / W times the bytes more one-shot, at most 65536 bytes.
  EXPECT_EQ(schedule(3, 98304), Schedule::kOneShot);
  EXPECT_EQ(schedule(3, 98304 + 64), Schedule::kTwoShot);
  EXPECT_EQ(schedule(8, 12480), Schedule::kOneShot);
  EXPECT_EQ(schedule(8, 12544), Schedule::kTwoShot);
  EXPECT_EQ(schedule(1024, 64), Schedule::kOneShot);
  EXPECT_EQ(schedule(1024, 128), Schedule::kTwoShot);
}

}  // namespace
}  // namespace powersgd
