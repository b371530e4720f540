// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <array>
#include <chrono>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <utility>

namespace powersgd {

// Purpose: the backends that the two parts of a ThreadEngine's jobs communicate on. They connect at
// the first collective of a job, so that a group which compresses nothing has none.
//
// Contract: all ranks run the same collectives in the same order, so they connect at the same one.
// If connecting fails, every use is that error.
//
// Threads: at() is for the engine's threads and waits for the other ranks. Everything else is safe
// from any thread and does not wait for it.
class Channels {
 public:
  using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
  using Pair = std::array<BackendPtr, 2>;
  // Connects within `timeout`, or within the one that the group was made with if it is unset.
  using Connect = std::function<Pair(std::optional<std::chrono::milliseconds> timeout)>;

  explicit Channels(Connect connect) : connect_(std::move(connect)) {}

  // The channel of the first parts (0) or the second (1). A call that connects does so within its
  // own `timeout`, or the group's if it is unset.
  c10d::Backend& at(size_t part, std::chrono::milliseconds timeout = c10d::kUnsetTimeout);
  // Sets the time-out of the channels that there are, and of those to come.
  void set_timeout(std::chrono::milliseconds timeout);
  // Calls it on every channel that is connected, even if it throws on one. Then rethrows the first
  // exception.
  void each(const std::function<void(c10d::Backend&)>& action) const;

 private:
  void connect(std::chrono::milliseconds timeout);

  std::mutex connecting_;  // guards the members below
  Connect connect_;        // null once it was called
  std::exception_ptr error_;

  mutable std::mutex mutex_;  // guards the members below, never for long
  Pair channels_;             // null until they are connected
  std::optional<std::chrono::milliseconds> timeout_;
};

}  // namespace powersgd
