// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <vector>

namespace powersgd {

// The parameters whose gradients a DDP module reduces: those that were trainable when it was made.
std::vector<at::Tensor> reduced_parameters(const c10d::Reducer& reducer);

}  // namespace powersgd
