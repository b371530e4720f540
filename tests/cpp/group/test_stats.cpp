// SPDX-License-Identifier: BSD-3-Clause
#include "powersgd/group/stats.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace powersgd {
namespace {

using Counts = std::array<int64_t, 9>;

// Returns all counts of a snapshot. It does not compile if one is not listed.
Counts counts_of(const StatsSnapshot& stats) {
  const auto& [steps, skipped, compressed, exact, before, after, compressed_before,
               compressed_after, differences, seconds] = stats;
  return {steps, skipped,           compressed,       exact,      before,
          after, compressed_before, compressed_after, differences};
}

TEST(Stats, ADifferenceIsThatOfEveryCount) {
  StatsSnapshot base{1, 2, 3, 4, 5, 6, 7, 8, 9, {1, 2, 3, 4, 5, 6}};
  StatsSnapshot now{11, 22, 33, 44, 55, 66, 77, 88, 99, {2, 4, 6, 8, 10, 12}};
  EXPECT_EQ(counts_of(now - base), (Counts{10, 20, 30, 40, 50, 60, 70, 80, 90}));
  EXPECT_EQ((now - base).seconds, base.seconds);
}

TEST(Stats, CallsAreCountedByTheirKind) {
  Stats stats;
  stats.add_exact(1000);
  stats.add_compressed(600, 20);
  stats.add_compressed(400, 30);
  stats.add_differences(2);
  const StatsSnapshot now = stats.snapshot();
  EXPECT_EQ(counts_of(now), (Counts{0, 0, 2, 1, 2000, 1050, 1000, 50, 2}));
  EXPECT_DOUBLE_EQ(now.ratio(), 2000.0 / 1050.0);
}

TEST(Stats, WhatAnOwnerCountsCountsInTheWhole) {
  const auto whole = std::make_shared<Stats>();
  Stats one(whole), other(whole);
  EXPECT_EQ(one.add_step(), 1);
  EXPECT_EQ(other.add_step(), 2) << "the number of the whole's step";
  one.add_exact(1000);
  other.add_compressed(400, 30);
  other.add_seconds(Stage::kProject, 0.5);
  EXPECT_EQ(counts_of(one.snapshot()), (Counts{1, 0, 0, 1, 1000, 1000, 0, 0, 0}));
  EXPECT_EQ(counts_of(other.snapshot()), (Counts{1, 0, 1, 0, 400, 30, 400, 30, 0}));
  one.reset();
  EXPECT_EQ(counts_of(one.snapshot()), Counts{});
  EXPECT_EQ(counts_of(whole->snapshot()), (Counts{2, 0, 1, 1, 1400, 1030, 400, 30, 0}));
  EXPECT_EQ(whole->snapshot().seconds[0], 0.5);
}

TEST(Stats, TheRatioOfNothingIsOne) { EXPECT_EQ(StatsSnapshot().ratio(), 1); }

TEST(Stats, EveryStepHasItsNumberOnAnyThread) {
  constexpr int kThreads = 4, kSteps = 20'000;
  Stats stats;
  std::array<std::vector<int64_t>, kThreads> numbers;
  std::vector<std::thread> threads;
  std::atomic<int> started{0};
  for (auto& own : numbers) {
    threads.emplace_back([&] {
      ++started;
      while (started < kThreads) std::this_thread::yield();
      for (int i = 0; i < kSteps; ++i) own.push_back(stats.add_step());
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::set<int64_t> all;
  for (const auto& own : numbers) all.insert(own.begin(), own.end());
  EXPECT_EQ(all.size(), size_t{kThreads} * kSteps);
  EXPECT_EQ(*all.rbegin(), kThreads * kSteps);
  EXPECT_EQ(stats.snapshot().steps, kThreads * kSteps);
}

TEST(Stats, ATimerAddsItsLifeToItsStageAlone) {
  Stats stats;
  stats.add_seconds(Stage::kReduceQ, 0.5);
  {
    const StageTimer timer(stats, Stage::kReduceQ);
    const auto start = std::chrono::steady_clock::now();
    while (std::chrono::steady_clock::now() == start) continue;
  }
  auto seconds = stats.snapshot().seconds;
  double& of_stage = seconds[static_cast<size_t>(Stage::kReduceQ)];
  EXPECT_GT(of_stage, 0.5);
  of_stage = 0;
  EXPECT_EQ(seconds, decltype(seconds){});
}

TEST(Stats, TheSummaryIsOneLine) {
  StatsSnapshot stats;
  stats.steps = 12;
  stats.skipped_steps = 3;
  stats.compressed_calls = 20;
  stats.exact_calls = 4;
  stats.bytes_before = 3'000'000;
  stats.bytes_after = 200'000;
  EXPECT_EQ(summary(stats),
            "12 steps (3 skipped): 3.0 MB of gradients sent as 0.2 MB, ratio 15.0; 20 calls "
            "compressed, 4 exact");
}

TEST(Stats, TheSummaryHoldsTheLargestCounts) {
  StatsSnapshot stats;
  stats.steps = stats.skipped_steps = INT64_MAX;
  stats.compressed_calls = stats.exact_calls = stats.bytes_before = stats.bytes_after = INT64_MAX;
  const std::string end = "compressed, 9223372036854775807 exact";
  const std::string line = summary(stats);
  ASSERT_GT(line.size(), end.size());
  EXPECT_EQ(line.substr(line.size() - end.size()), end);
}

}  // namespace
}  // namespace powersgd
