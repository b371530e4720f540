// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <utility>

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace powersgd::test {

// Returns what connects a session or an engine to this backend at once.
inline auto connected(c10::intrusive_ptr<c10d::Backend> backend) {
  return [backend = std::move(backend)](auto&&...) { return backend; };
}

}  // namespace powersgd::test
