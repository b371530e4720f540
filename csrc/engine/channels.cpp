// SPDX-License-Identifier: BSD-3-Clause
#include "engine/channels.h"

#include <c10/util/Exception.h>

#include <utility>

#include "powersgd/first_error.h"

namespace powersgd {

c10d::Backend& Channels::at(size_t part, std::chrono::milliseconds timeout) {
  const std::lock_guard<std::mutex> lock(connecting_);
  if (connect_) {
    try {
      connect(timeout);
    } catch (const std::exception& error) {
      const auto* of_torch = dynamic_cast<const c10::Error*>(&error);
      error_ = std::make_exception_ptr(
          C10_BUILD_ERROR(DistBackendError,
                          c10::str("powersgd: the ranks could not connect for compressed steps: ",
                                   of_torch ? of_torch->what_without_backtrace() : error.what())));
    }
    connect_ = nullptr;
  }
  if (error_) std::rethrow_exception(error_);
  return *channels_[part];
}

void Channels::connect(std::chrono::milliseconds timeout) {
  std::optional<std::chrono::milliseconds> within = timeout;
  if (timeout == c10d::kUnsetTimeout) {
    const std::lock_guard<std::mutex> lock(mutex_);
    within = timeout_;
  }
  Pair made = connect_(within);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (timeout_) {
    for (const BackendPtr& channel : made) channel->setTimeout(*timeout_);
  }
  channels_ = std::move(made);
}

void Channels::set_timeout(std::chrono::milliseconds timeout) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    timeout_ = timeout;
  }
  each([&](c10d::Backend& channel) { channel.setTimeout(timeout); });
}

void Channels::each(const std::function<void(c10d::Backend&)>& action) const {
  Pair channels;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    channels = channels_;
  }
  FirstError error;
  for (const BackendPtr& channel : channels) {
    if (channel) error.run([&] { action(*channel); });
  }
  error.rethrow();
}

}  // namespace powersgd
