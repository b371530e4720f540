// SPDX-License-Identifier: BSD-3-Clause
#include "powersgd/reducer_members.h"

#include <torch/csrc/autograd/variable.h>

namespace powersgd {
namespace {

// The reducer shows none of these, so this class reads the protected members.
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

}  // namespace powersgd
