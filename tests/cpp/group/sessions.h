// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "powersgd/group/session.h"
#include "powersgd/model/bucket_reducer.h"
#include "ranks/connected.h"
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

// Rank 0 of two equal ranks: with a thread engine if the backend `blocks` the host, as Gloo does,
// and otherwise with a stream engine.
inline InnerAndConnect inner_of_equal_ranks(at::Device device, bool blocks) {
  if (!blocks) return {device.type(), c10::make_intrusive<StreamBackend>(), {}, {}};
  const auto host = c10::make_intrusive<HostBackend>();
  return {device.type(), host, connected(host), {}};
}

inline std::shared_ptr<Session> session_of_equal_ranks(at::Device device, const Options& options,
                                                       LogSink log = {}, bool blocks = false) {
  return std::make_shared<Session>(
      0, 2, std::vector{inner_of_equal_ranks(device, blocks || device.is_cpu())}, options,
      std::move(log));
}

// Calls fn(rank, inner, engines) on a thread for each of `size` ranks: `engines` are the backends
// that the ranks' engines connect to. A rank that throws ends the waiting of its peers.
inline void run_with_engines(
    int size, const std::function<void(int, InnerAndConnect, const ThreadBackends&)>& fn) {
  const ThreadBackends engines = make_thread_backends(size);
  run_ranks(size, [&](int rank, const auto& inner) {
    const auto& own = engines[static_cast<size_t>(rank)];
    try {
      fn(rank, {c10::DeviceType::CPU, inner, connected(own), {}}, engines);
    } catch (...) {
      own->kill("a rank threw");
      throw;
    }
  });
}

// Calls fn(rank, session, log) there.
inline void run_sessions(
    int size, const Options& options,
    const std::function<void(int, const std::shared_ptr<Session>&, const Log&)>& fn) {
  run_with_engines(size, [&](int rank, InnerAndConnect inner, const ThreadBackends&) {
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
                                             const std::vector<at::Tensor>& parameters,
                                             BucketReducer* previous = nullptr) {
  std::vector<std::string> names;
  for (size_t i = 0; i < parameters.size(); ++i) names.push_back(std::to_string(i));
  auto reducer = BucketReducer::make(session, names, parameters, session->options(), previous);
  reducer->note_attached();
  return reducer;
}

}  // namespace powersgd::test
