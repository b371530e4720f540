// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <utility>

namespace powersgd {

// Purpose: the backend that the jobs of a ThreadEngine communicate on. It connects at a job's first
// collective, so a group that compresses nothing has no connection.
//
// Contract: all ranks run the same collectives in the same order, so they connect at the same one.
// If connecting fails, every use throws that error.
//
// Threads: backend() is for the engine's worker and waits for the other ranks. Everything else is
// safe from any thread and does not wait for it.
class Connection {
 public:
  using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
  // Connects within `timeout`, or within the timeout that the group was made with if it is unset.
  using Connect = std::function<BackendPtr(std::optional<std::chrono::milliseconds> timeout)>;

  explicit Connection(Connect connect) : connect_(std::move(connect)) {}

  // Returns the backend. A call that connects does so within its own `timeout`, or the group's if
  // it is unset.
  const BackendPtr& backend(std::chrono::milliseconds timeout = c10d::kUnsetTimeout);
  // Sets the backend's timeout, even if it is yet to connect.
  void set_timeout(std::chrono::milliseconds timeout);
  // The timeout that was set, or unset.
  std::chrono::milliseconds timeout() const;
  // Calls `action` on the backend if it is connected.
  void if_connected(const std::function<void(c10d::Backend&)>& action) const;

 private:
  void connect(std::chrono::milliseconds timeout);

  std::mutex connecting_;  // guards the members below
  Connect connect_;        // null once it was called
  std::exception_ptr error_;

  mutable std::mutex mutex_;  // guards the members below, never held for long
  BackendPtr backend_;        // null until it is connected
  std::optional<std::chrono::milliseconds> timeout_;
};

}  // namespace powersgd
