// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <utility>
#include <vector>

#include "engine/engine.h"

namespace powersgd {

// A backend's own collectives as a channel. They run on the current stream if the backend is
// ordered by streams. Otherwise each has ended when it returns.
class BackendChannel final : public Channel {
 public:
  BackendChannel(c10d::Backend& backend, std::chrono::milliseconds timeout)
      : backend_(backend), timeout_(timeout) {}

  void allreduce(at::Tensor& payload) override {
    std::vector<at::Tensor> tensors = {payload};
    wait(backend_.allreduce(tensors, with_timeout<c10d::AllreduceOptions>()));
  }

  void allgather(at::Tensor& output, at::Tensor& input) override {
    wait(backend_._allgather_base(output, input, with_timeout<c10d::AllgatherOptions>()));
  }

  void alltoall(at::Tensor& output, at::Tensor& input) override {
    std::vector<int64_t> equal_outputs, equal_inputs;  // empty: parts of equal size
    wait(backend_.alltoall_base(output, input, equal_outputs, equal_inputs,
                                with_timeout<c10d::AllToAllOptions>()));
  }

 private:
  template <typename Options>
  Options with_timeout() const {
    Options options;
    options.timeout = timeout_;
    options.asyncOp = false;
    return options;
  }

  // NCCL returns no Work for a collective that has run on the current stream.
  static void wait(const c10::intrusive_ptr<c10d::Work>& work) {
    if (work) work->wait();
  }

  c10d::Backend& backend_;
  const std::chrono::milliseconds timeout_;
};

}  // namespace powersgd
