// SPDX-License-Identifier: BSD-3-Clause
#include "powersgd/reduced_parameters.h"

namespace powersgd {
namespace {

// The reducer shows its parameters to nobody, so this class reads the protected member.
class Parameters : public c10d::Reducer {
 public:
  static const std::vector<at::Tensor>& of(const c10d::Reducer& reducer) {
    return reducer.*(&Parameters::params_);
  }
};

}  // namespace

std::vector<at::Tensor> reduced_parameters(const c10d::Reducer& reducer) {
  return Parameters::of(reducer);
}

}  // namespace powersgd
