// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <vector>

#include "engine/engine.h"

namespace powersgd {

// An inner backend as a channel. Whether waiting blocks the host or the current stream is up to the
// backend.
class BackendChannel final : public Channel {
 public:
  // A backend that is ordered by streams runs its collectives on the current stream itself if they
  // are `on_current_stream`. Others ignore it.
  BackendChannel(c10d::Backend& backend, std::chrono::milliseconds timeout,
                 bool on_current_stream = false)
      : backend_(backend), timeout_(timeout), on_current_stream_(on_current_stream) {}

  void allreduce(at::Tensor& payload) override {
    std::vector<at::Tensor> tensors = {payload};
    c10d::AllreduceOptions options;
    options.timeout = timeout_;
    options.asyncOp = !on_current_stream_;
    // NCCL returns no Work for a collective that has run on the current stream.
    if (const auto work = backend_.allreduce(tensors, options)) work->wait();
  }

 private:
  c10d::Backend& backend_;
  const std::chrono::milliseconds timeout_;
  const bool on_current_stream_;
};

}  // namespace powersgd
