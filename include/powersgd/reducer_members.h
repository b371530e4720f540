// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <cstdint>
#include <optional>
#include <vector>

namespace powersgd {

// The parameters whose gradients a DDP module reduces: those that were trainable when it was made.
std::vector<at::Tensor> reduced_parameters(const c10d::Reducer& reducer);

// The index of the first of these whose gradients DDP no longer gets. A conversion to another dtype
// or device, such as module.half(), gives a parameter a new node of autograd, without DDP's hook.
std::optional<size_t> converted_parameter(const c10d::Reducer& reducer);

// The number of forward passes whose gradients the module was to reduce.
int64_t synchronized_passes(const c10d::Reducer& reducer);

}  // namespace powersgd
