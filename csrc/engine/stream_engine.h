// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <map>
#include <mutex>
#include <utility>

#include "engine/engine.h"

namespace powersgd {

// The engine over a backend that is ordered by streams (NCCL). It needs no thread and never
// synchronizes the host.
//
// submit() enqueues the whole job on the device's side stream, which waits for the caller's stream,
// and returns. Waiting for the Work makes the waiter's stream wait for the side stream.
//
// The channel is the inner backend that also serves the caller. That backend runs its collectives
// on a stream of its own, in the order of issue. So the job's and the caller's never overlap on the
// communicator, and no second communicator takes device memory.
class StreamEngine final : public Engine {
 public:
  StreamEngine(int rank, c10::intrusive_ptr<c10d::Backend> channel)
      : rank_(rank), channel_(std::move(channel)) {}

  c10::intrusive_ptr<c10d::Work> submit(std::vector<at::Tensor> tensors, Job job,
                                        c10::Device device,
                                        std::chrono::milliseconds timeout) override;
  void shutdown() override { closed_ = true; }
  void abort() override { closed_ = true; }

 private:
  c10::Stream side_stream(c10::Device device);

  const int rank_;
  const c10::intrusive_ptr<c10d::Backend> channel_;
  std::atomic<bool> closed_{false};
  std::mutex mutex_;  // enqueues one job at a time, so that collectives follow the order of submit
  std::map<c10::DeviceIndex, c10::Stream> side_streams_;
};

}  // namespace powersgd
