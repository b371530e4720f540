// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "powersgd/core/plan.h"

// A parameter has two layouts: the sizes and strides that the user sees, and the [rows, cols]
// matrix in a bucket's memory. They differ if a dense parameter is not contiguous, such as a
// channels_last weight, because DDP copies its gradient in the parameter's own memory order.
namespace powersgd {

// Returns the parameters as DDP reduces them: complex numbers as pairs of real ones.
std::vector<at::Tensor> as_reals(const std::vector<at::Tensor>& parameters);

ParameterShape memory_layout(const at::Tensor& parameter);

// [rows, cols] in memory order -> the parameter's shape, contiguous, and back.
at::Tensor to_parameter_order(const at::Tensor& matrix, const at::Tensor& parameter);
at::Tensor to_memory_order(const at::Tensor& tensor, const at::Tensor& parameter);

// [rank, cols] in memory order -> the columns in the order of a contiguous parameter, and back.
at::Tensor q_to_parameter_order(const at::Tensor& q, const at::Tensor& parameter);
at::Tensor q_to_memory_order(const at::Tensor& q, const at::Tensor& parameter);

}  // namespace powersgd
