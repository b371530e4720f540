// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "powersgd/session.h"
#include "ranks/ready_channels.h"
#include "ranks/two_equal_ranks.h"

namespace powersgd::test {

// Makes the session of rank 0 of two equal ranks: with a stream engine on the fake device, with a
// thread engine on the CPU.
inline std::shared_ptr<Session> make_session_of_equal_ranks(at::Device device,
                                                            const Options& options,
                                                            LogSink log = {}) {
  InnerAndChannels inner{device.type(), c10::make_intrusive<StreamBackend>(), {}, {}};
  if (device.is_cpu()) {
    inner.inner = c10::make_intrusive<HostBackend>();
    inner.connect_channels = ready_channels(inner.inner, inner.inner);
  }
  return std::make_shared<Session>(0, 2, std::vector{inner}, options, std::move(log));
}

}  // namespace powersgd::test
