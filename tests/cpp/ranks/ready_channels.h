// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <array>
#include <utility>

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace powersgd::test {

// Returns what connects the channels of a session or an engine, to these backends at once.
inline auto ready_channels(c10::intrusive_ptr<c10d::Backend> p,
                           c10::intrusive_ptr<c10d::Backend> q) {
  return [channels = std::array{std::move(p), std::move(q)}](auto&&...) { return channels; };
}

}  // namespace powersgd::test
