// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "powersgd/engine/first_error.h"

namespace powersgd {

// A member's part for itself may be where it belongs already.
inline void copy_unless_same(const at::Tensor& to, const at::Tensor& from) {
  if (to.data_ptr() != from.data_ptr()) to.copy_(from);
}

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

  void allgather(at::Tensor& output, at::Tensor& input, const Members* members) override {
    if (members) return exchange(output, input, *members, /*scatters=*/false);
    wait(backend_._allgather_base(output, input, with_timeout<c10d::AllgatherOptions>()));
  }

  void alltoall(at::Tensor& output, at::Tensor& input, const Members* members) override {
    if (members) return exchange(output, input, *members, /*scatters=*/true);
    std::vector<int64_t> equal_outputs, equal_inputs;  // empty: parts of equal size
    wait(backend_.alltoall_base(output, input, equal_outputs, equal_inputs,
                                with_timeout<c10d::AllToAllOptions>()));
  }

 private:
  // Sends `input`, or a part of it if it `scatters`, to each of the other members. Messages of one
  // coalescing block are in flight at once, and members need no group of their own.
  void exchange(const at::Tensor& output, const at::Tensor& input, const Members& members,
                bool scatters) {
    const at::Tensor outputs = output.view({members.count(), -1});
    const at::Tensor inputs = input.view({scatters ? members.count() : 1, -1});
    const auto part_for = [&](int member) { return inputs[scatters ? member : 0]; };
    copy_unless_same(outputs[members.own], part_for(members.own));
    backend_.startCoalescing();
    FirstError error;
    error.run([&] {
      for (int i = 0; i < members.count(); ++i) {
        if (i == members.own) continue;
        const int rank = members.ranks[static_cast<size_t>(i)];
        std::vector<at::Tensor> to = {part_for(i)}, from = {outputs[i]};
        backend_.send(to, rank, /*tag=*/0);
        backend_.recv(from, rank, /*tag=*/0);
      }
    });
    error.run([&] { wait(backend_.endCoalescing()); });
    error.rethrow();
  }

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
