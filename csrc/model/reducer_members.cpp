// SPDX-License-Identifier: BSD-3-Clause
#include "powersgd/model/reducer_members.h"

#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "group/buffer_place.h"

namespace powersgd {

std::optional<size_t> ReducerMembers::converted_parameter(const c10d::Reducer& reducer) {
  const auto& nodes = reducer.*(&ReducerMembers::grad_accumulators_);
  for (size_t i = 0; i < nodes.size(); ++i) {
    const auto node = torch::autograd::impl::try_get_grad_accumulator(parameters(reducer)[i]);
    if (node.get() != nodes[i].get()) return i;
  }
  return std::nullopt;
}

size_t ReducerMembers::bucket_number(const c10d::Reducer& reducer, const Parameters& members) {
  const Parameters& all = parameters(reducer);
  const auto found = std::find_if(all.begin(), all.end(), [&](const at::Tensor& parameter) {
    return parameter.is_same(members.front());
  });
  TORCH_INTERNAL_ASSERT(found != all.end());
  const auto& locators = reducer.*(&ReducerMembers::variable_locators_);
  return locators[static_cast<size_t>(found - all.begin())].bucket_index;
}

std::optional<size_t> ReducerMembers::bucket_in(const c10d::Reducer& reducer,
                                                const at::Tensor& buffer) {
  const BufferPlace place(buffer);
  const auto& buckets = reducer.*(&ReducerMembers::buckets_);
  for (size_t i = 0; i < buckets.size(); ++i) {
    if (buckets[i].gradients.defined() && place.is_of(buckets[i].gradients)) return i;
  }
  return std::nullopt;
}

std::vector<Use> ReducerMembers::uses(const c10d::Reducer& reducer, size_t bucket,
                                      const Parameters& members) {
  const bool looks_for_unused = reducer.*(&ReducerMembers::find_unused_parameters_) ||
                                reducer.*(&ReducerMembers::static_graph_);
  if (!looks_for_unused) return {};
  const auto used = (reducer.*(&ReducerMembers::local_used_map_)).accessor<int32_t, 1>();
  const auto& indices = (reducer.*(&ReducerMembers::buckets_))[bucket].variable_indices;
  std::vector<Use> uses;
  for (size_t i = 0; i < indices.size(); ++i) {
    const Use unused = members[i].grad().defined() ? Use::kStale : Use::kUnused;
    uses.push_back(used[static_cast<int64_t>(indices[i])] != 0 ? Use::kUsed : unused);
  }
  const bool all = std::all_of(uses.begin(), uses.end(), [](Use use) { return use == Use::kUsed; });
  return all ? std::vector<Use>{} : uses;
}

bool ReducerMembers::is_last(const c10d::Reducer& reducer, size_t bucket) {
  const auto& buckets = reducer.*(&ReducerMembers::buckets_);
  const bool skips_unused = reducer.*(&ReducerMembers::skip_all_reduce_unused_params_);
  const std::vector<size_t>& unused = reducer.*(&ReducerMembers::unused_parameters_);
  const auto is_unused = [&](size_t index) {
    return std::find(unused.begin(), unused.end(), index) != unused.end();
  };
  const auto next = buckets.begin() + static_cast<std::ptrdiff_t>(bucket) + 1;
  return std::all_of(next, buckets.end(), [&](const auto& later) {
    const std::vector<size_t>& indices = later.variable_indices;
    return skips_unused && std::all_of(indices.begin(), indices.end(), is_unused);
  });
}

}  // namespace powersgd
