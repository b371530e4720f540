// SPDX-License-Identifier: BSD-3-Clause
#include "powersgd/core/hosts.h"

#include <algorithm>
#include <map>

namespace powersgd {
namespace {

Members members(std::vector<int> ranks, int rank) {
  std::sort(ranks.begin(), ranks.end());
  const auto own = std::find(ranks.begin(), ranks.end(), rank) - ranks.begin();
  return {std::move(ranks), static_cast<int>(own)};
}

}  // namespace

std::shared_ptr<const Levels> levels_of(const std::vector<int>& hosts, int rank) {
  std::map<int, std::vector<int>> ranks_of;
  for (size_t i = 0; i < hosts.size(); ++i) ranks_of[hosts[i]].push_back(static_cast<int>(i));
  if (ranks_of.size() < 2) return nullptr;
  const size_t count = ranks_of.begin()->second.size();
  const bool equal = std::all_of(ranks_of.begin(), ranks_of.end(),
                                 [&](const auto& host) { return host.second.size() == count; });
  if (!equal || count < 2) return nullptr;
  const Members within = members(ranks_of.at(hosts[static_cast<size_t>(rank)]), rank);
  std::vector<int> across;
  for (const auto& host : ranks_of) across.push_back(host.second[static_cast<size_t>(within.own)]);
  return std::make_shared<const Levels>(Levels{within, members(std::move(across), rank)});
}

}  // namespace powersgd
