// SPDX-License-Identifier: BSD-3-Clause
#include "powersgd/reducer_members.h"

#include <torch/csrc/autograd/variable.h>

#include <algorithm>

namespace powersgd {
namespace {

class Members : public c10d::Reducer {
 public:
  static const auto& parameters(const c10d::Reducer& reducer) {
    return reducer.*(&Members::params_);
  }
  static const auto& nodes(const c10d::Reducer& reducer) {
    return reducer.*(&Members::grad_accumulators_);
  }
  static int64_t passes(const c10d::Reducer& reducer) {
    return reducer.*(&Members::num_iterations_);
  }
  static const auto& group(const c10d::Reducer& reducer) {
    return reducer.*(&Members::process_group_);
  }
  static int divisor(const c10d::Reducer& reducer) { return reducer.*(&Members::div_factor_); }

  static bool looks_for_unused(const c10d::Reducer& reducer) {
    return reducer.*(&Members::find_unused_parameters_) || reducer.*(&Members::static_graph_);
  }
  static bool skips_unused(const c10d::Reducer& reducer) {
    return reducer.*(&Members::skip_all_reduce_unused_params_);
  }
  static const auto& used(const c10d::Reducer& reducer) {
    return reducer.*(&Members::local_used_map_);
  }
  static const auto& unused(const c10d::Reducer& reducer) {
    return reducer.*(&Members::unused_parameters_);
  }

  static size_t buckets(const c10d::Reducer& reducer) {
    return (reducer.*(&Members::buckets_)).size();
  }
  static size_t bucket_of(const c10d::Reducer& reducer, size_t parameter) {
    return (reducer.*(&Members::variable_locators_))[parameter].bucket_index;
  }
  // The indices of the parameters of a bucket.
  static const std::vector<size_t>& indices(const c10d::Reducer& reducer, size_t bucket) {
    return (reducer.*(&Members::buckets_))[bucket].variable_indices;
  }
};

}  // namespace

std::vector<at::Tensor> reduced_parameters(const c10d::Reducer& reducer) {
  return Members::parameters(reducer);
}

std::optional<size_t> converted_parameter(const c10d::Reducer& reducer) {
  const auto& parameters = Members::parameters(reducer);
  const auto& nodes = Members::nodes(reducer);
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto node = torch::autograd::impl::try_get_grad_accumulator(parameters[i]);
    if (node.get() != nodes[i].get()) return i;
  }
  return std::nullopt;
}

int64_t synchronized_passes(const c10d::Reducer& reducer) { return Members::passes(reducer); }

const c10::intrusive_ptr<c10d::ProcessGroup>& process_group(const c10d::Reducer& reducer) {
  return Members::group(reducer);
}

int divisor(const c10d::Reducer& reducer) { return Members::divisor(reducer); }

size_t bucket_number(const c10d::Reducer& reducer, const std::vector<at::Tensor>& parameters) {
  const auto& all = Members::parameters(reducer);
  const auto found = std::find_if(all.begin(), all.end(), [&](const at::Tensor& parameter) {
    return parameter.is_same(parameters.front());
  });
  TORCH_INTERNAL_ASSERT(found != all.end());
  return Members::bucket_of(reducer, static_cast<size_t>(found - all.begin()));
}

std::vector<Use> uses(const c10d::Reducer& reducer, size_t bucket,
                      const std::vector<at::Tensor>& parameters) {
  if (!Members::looks_for_unused(reducer)) return {};
  const auto used = Members::used(reducer).accessor<int32_t, 1>();
  const std::vector<size_t>& indices = Members::indices(reducer, bucket);
  std::vector<Use> uses;
  for (size_t i = 0; i < indices.size(); ++i) {
    const Use unused = parameters[i].grad().defined() ? Use::kStale : Use::kUnused;
    uses.push_back(used[static_cast<int64_t>(indices[i])] != 0 ? Use::kUsed : unused);
  }
  const bool all = std::all_of(uses.begin(), uses.end(), [](Use use) { return use == Use::kUsed; });
  return all ? std::vector<Use>{} : uses;
}

bool is_last(const c10d::Reducer& reducer, size_t bucket) {
  const std::vector<size_t>& unused = Members::unused(reducer);
  const auto is_unused = [&](size_t index) {
    return std::find(unused.begin(), unused.end(), index) != unused.end();
  };
  for (size_t i = bucket + 1; i < Members::buckets(reducer); ++i) {
    const std::vector<size_t>& later = Members::indices(reducer, i);
    const bool skipped =
        Members::skips_unused(reducer) && std::all_of(later.begin(), later.end(), is_unused);
    if (!skipped) return false;
  }
  return true;
}

}  // namespace powersgd
