// SPDX-License-Identifier: BSD-3-Clause
#include "engine/connection.h"

#include <c10/util/Exception.h>

#include <utility>

namespace powersgd {

const Connection::BackendPtr& Connection::backend(std::chrono::milliseconds timeout) {
  const std::lock_guard<std::mutex> lock(connecting_);
  if (connect_) {
    try {
      connect(timeout);
    } catch (const std::exception& error) {
      const auto* of_torch = dynamic_cast<const c10::Error*>(&error);
      error_ = std::make_exception_ptr(
          C10_BUILD_ERROR(DistBackendError,
                          c10::str("powersgd: could not connect the ranks for compressed steps: ",
                                   of_torch ? of_torch->what_without_backtrace() : error.what())));
    }
    connect_ = nullptr;
  }
  if (error_) std::rethrow_exception(error_);
  return backend_;
}

void Connection::connect(std::chrono::milliseconds timeout) {
  std::optional<std::chrono::milliseconds> within = timeout;
  if (timeout == c10d::kUnsetTimeout) {
    const std::lock_guard<std::mutex> lock(mutex_);
    within = timeout_;
  }
  BackendPtr made = connect_(within);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (timeout_) made->setTimeout(*timeout_);
  backend_ = std::move(made);
}

void Connection::set_timeout(std::chrono::milliseconds timeout) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    timeout_ = timeout;
  }
  if_connected([&](c10d::Backend& backend) { backend.setTimeout(timeout); });
}

std::chrono::milliseconds Connection::timeout() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return timeout_.value_or(c10d::kUnsetTimeout);
}

void Connection::if_connected(const std::function<void(c10d::Backend&)>& action) const {
  BackendPtr connected;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    connected = backend_;
  }
  if (connected) action(*connected);
}

}  // namespace powersgd
