// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <functional>
#include <utility>
#include <vector>

#include "engine/engine.h"

namespace powersgd {

// An inner backend as a channel. Whether waiting blocks the host or the current stream is up to the
// backend.
class BackendChannel final : public Channel {
 public:
  using Find = std::function<c10d::Backend&()>;

  // `find` returns the backend when a collective needs it. A backend that is ordered by streams
  // runs its collectives on the current stream itself if they are `on_current_stream`. Others
  // ignore it.
  BackendChannel(Find find, std::chrono::milliseconds timeout, bool on_current_stream = false)
      : find_(std::move(find)), timeout_(timeout), on_current_stream_(on_current_stream) {}
  BackendChannel(c10d::Backend& backend, std::chrono::milliseconds timeout,
                 bool on_current_stream = false)
      : BackendChannel([&backend]() -> c10d::Backend& { return backend; }, timeout,
                       on_current_stream) {}

  void allreduce(at::Tensor& payload) override {
    std::vector<at::Tensor> tensors = {payload};
    c10d::AllreduceOptions options;
    options.timeout = timeout_;
    options.asyncOp = !on_current_stream_;
    wait(find_().allreduce(tensors, options));
  }

  void allgather(at::Tensor& output, at::Tensor& input) override {
    c10d::AllgatherOptions options;
    options.timeout = timeout_;
    options.asyncOp = !on_current_stream_;
    wait(find_()._allgather_base(output, input, options));
  }

  void alltoall(at::Tensor& output, at::Tensor& input) override {
    // Not every backend that blocks the host (Gloo) has an all-to-all of its tensors elsewhere.
    if (!on_current_stream_ && !input.is_cpu()) return alltoall_through_host(output, input);
    c10d::AllToAllOptions options;
    options.timeout = timeout_;
    options.asyncOp = !on_current_stream_;
    std::vector<int64_t> equal_outputs, equal_inputs;  // empty: parts of equal size
    wait(find_().alltoall_base(output, input, equal_outputs, equal_inputs, options));
  }

 private:
  // NCCL returns no Work for a collective that has run on the current stream.
  static void wait(const c10::intrusive_ptr<c10d::Work>& work) {
    if (work) work->wait();
  }

  void alltoall_through_host(at::Tensor& output, const at::Tensor& input) {
    at::Tensor input_on_host = input.cpu();
    at::Tensor output_on_host = at::empty_like(input_on_host);
    alltoall(output_on_host, input_on_host);
    output.copy_(output_on_host);
  }

  const Find find_;
  const std::chrono::milliseconds timeout_;
  const bool on_current_stream_;
};

}  // namespace powersgd
