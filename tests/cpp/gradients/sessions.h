// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "powersgd/bucket_reducer.h"
#include "powersgd/session.h"
#include "ranks/ready_channels.h"
#include "ranks/thread_ranks.h"
#include "ranks/two_equal_ranks.h"
#include "support/errors.h"

namespace powersgd::test {

// The lines that a session logs, each after its level.
class Log {
 public:
  LogSink sink() {
    return [this](LogLevel level, const std::string& line) {
      lines.push_back((level == LogLevel::kWarning ? "warning: " : "info: ") + line);
    };
  }
  int count(const std::string& part) const {
    int count = 0;
    for (const std::string& line : lines) count += contains(line, part);
    return count;
  }

  std::vector<std::string> lines;
};

// Rank 0 of two equal ranks: with a stream engine on the fake device, with a thread engine on the
// CPU.
inline InnerAndChannels inner_of_equal_ranks(at::Device device) {
  if (!device.is_cpu()) return {device.type(), c10::make_intrusive<StreamBackend>(), {}, {}};
  const auto host = c10::make_intrusive<HostBackend>();
  return {device.type(), host, ready_channels(host, host), {}};
}

inline std::shared_ptr<Session> session_of_equal_ranks(at::Device device, const Options& options,
                                                       LogSink log = {}) {
  return std::make_shared<Session>(0, 2, std::vector{inner_of_equal_ranks(device)}, options,
                                   std::move(log));
}

// Calls fn(rank, inner, channels) on a thread for each of `size` ranks. A rank that throws ends the
// waiting of its peers.
inline void run_with_channels(
    int size, const std::function<void(int, InnerAndChannels, const Channels&)>& fn) {
  const Channels channels(size);
  run_ranks(size, [&](int rank, const auto& inner) {
    try {
      fn(rank, {c10::DeviceType::CPU, inner, channels.of(rank), {}}, channels);
    } catch (...) {
      channels.kill(rank);
      throw;
    }
  });
}

// Calls fn(rank, session, log) there.
inline void run_sessions(
    int size, const Options& options,
    const std::function<void(int, const std::shared_ptr<Session>&, const Log&)>& fn) {
  run_with_channels(size, [&](int rank, InnerAndChannels inner, const Channels&) {
    Log log;
    const auto session =
        std::make_shared<Session>(rank, size, std::vector{std::move(inner)}, options, log.sink());
    fn(rank, session, log);
  });
}

using Shapes = std::vector<std::vector<int64_t>>;

inline std::vector<at::Tensor> zeros(const Shapes& shapes, at::Device device) {
  std::vector<at::Tensor> tensors;
  for (const auto& shape : shapes) tensors.push_back(at::zeros(shape, device));
  return tensors;
}

// Attaches parameters, whose names are "0", "1", ...
inline std::shared_ptr<BucketReducer> attach(const std::shared_ptr<Session>& session,
                                             const std::vector<at::Tensor>& parameters) {
  std::vector<std::string> names;
  for (size_t i = 0; i < parameters.size(); ++i) names.push_back(std::to_string(i));
  return BucketReducer::attach(session, names, parameters, session->options());
}

}  // namespace powersgd::test
