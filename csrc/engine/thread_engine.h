// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <array>
#include <memory>
#include <thread>

#include "engine/engine.h"

namespace powersgd {

// The engine over a backend whose collectives block the host (Gloo, MPI): a pipeline of two worker
// threads, one for the jobs' first parts and one for their second, each first in, first out, and
// each with a channel of its own. While the Q payload of a bucket is on the wire, the next bucket is
// projected and its P sent. The order on each channel is that of submission and never that of events.
//
// Nothing here can hang a process. A collective in flight cannot be interrupted, so workers that
// do not end within the grace period are left behind with all that they use; they end by
// themselves at the inner backend's timeout.
class ThreadEngine final : public Engine {
 public:
  // `channels`: for the first and the second parts.
  ThreadEngine(int rank, std::array<c10::intrusive_ptr<c10d::Backend>, 2> channels);
  ~ThreadEngine() override;

  c10::intrusive_ptr<c10d::Work> submit(std::vector<at::Tensor> tensors, Job job,
                                        c10::Device device,
                                        std::chrono::milliseconds timeout) override;
  void shutdown() override;
  void abort() override;

 private:
  struct Shared;  // what the workers use, and so may outlive the engine

  void stop(bool run_queued);

  const int rank_;
  const std::shared_ptr<Shared> shared_;
  std::array<std::thread, 2> workers_;
};

// Shuts down every engine of the process: for the exit of an interpreter whose user did not destroy
// the process groups.
void shutdown_all_engines();

}  // namespace powersgd
