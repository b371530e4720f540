// SPDX-License-Identifier: BSD-3-Clause
#include "powersgd/core/hosts.h"

#include <gtest/gtest.h>

#include <vector>

namespace powersgd {
namespace {

using Ints = std::vector<int>;

TEST(Levels, AreThoseOfEqualHostsOfSeveralRanks) {
  const Ints hosts = {4, 1, 4, 9, 9, 1};
  const Ints within[] = {{0, 2}, {1, 5}, {0, 2}, {3, 4}, {3, 4}, {1, 5}};
  const Ints across[] = {{0, 1, 3}, {0, 1, 3}, {2, 4, 5}, {0, 1, 3}, {2, 4, 5}, {2, 4, 5}};
  for (int rank = 0; rank < 6; ++rank) {
    const auto levels = levels_of(hosts, rank);
    ASSERT_TRUE(levels);
    EXPECT_EQ(levels->within.ranks, within[rank]);
    EXPECT_EQ(levels->across.ranks, across[rank]);
    EXPECT_EQ(levels->within.ranks[static_cast<size_t>(levels->within.own)], rank);
    EXPECT_EQ(levels->across.ranks[static_cast<size_t>(levels->across.own)], rank);
  }
}

TEST(Levels, AreOneOtherwise) {
  for (const Ints& hosts : {Ints{}, Ints{0}, Ints{0, 0}, Ints{0, 1}, Ints{0, 0, 1}}) {
    EXPECT_FALSE(levels_of(hosts, 0));
  }
}

}  // namespace
}  // namespace powersgd
