// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <memory>
#include <vector>

namespace powersgd {

// Some ranks of a group, in ascending order.
struct Members {
  std::vector<int> ranks;
  int own = 0;  // ranks[own] is this rank

  int count() const { return static_cast<int>(ranks.size()); }
};

// The two levels of a group whose hosts have several ranks each. The ranks of a host are numbered
// from 0; those with one number on all hosts exchange what their hosts have summed.
struct Levels {
  Members within;  // this rank's host
  Members across;  // the ranks with this rank's number, one of each host
};

// Returns the levels of `rank` if rank i is on host `hosts[i]`, hosts numbered in any way. Null
// unless there are at least two hosts, with equally many ranks each, and at least two.
std::shared_ptr<const Levels> levels_of(const std::vector<int>& hosts, int rank);

}  // namespace powersgd
