// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/ATen.h>

#include <functional>

namespace powersgd::test {

// Runs `body` in a backward pass of autograd, on the calling thread.
inline void in_backward(const std::function<void()>& body) {
  const at::Tensor leaf = at::ones({1}).set_requires_grad(true);
  const at::Tensor output = leaf.mul(2);
  output.register_hook([&](const at::Tensor&) { body(); });
  output.backward();
}

}  // namespace powersgd::test
