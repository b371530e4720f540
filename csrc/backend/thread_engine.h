// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <memory>
#include <thread>

#include "backend/engine.h"

namespace powersgd {

// The engine over a backend whose collectives block the host (Gloo, MPI): one worker thread, first
// in, first out, with a lane of its own.
//
// Nothing here can hang a process. A collective in flight cannot be interrupted, so a worker that
// does not end within the grace period is left behind with all that it uses; it ends by itself at
// the inner backend's timeout.
class ThreadEngine final : public Engine {
 public:
  ThreadEngine(int rank, c10::intrusive_ptr<c10d::Backend> lane);
  ~ThreadEngine() override;

  c10::intrusive_ptr<c10d::Work> submit(std::vector<at::Tensor> tensors, Job job,
                                        std::chrono::milliseconds timeout) override;
  void shutdown() override;
  void abort() override;

 private:
  struct Shared;  // what the worker uses, and so may outlive the engine

  void stop(bool run_queued);

  const int rank_;
  const std::shared_ptr<Shared> shared_;
  std::thread worker_;
};

// Shuts down every engine of the process: for the exit of an interpreter whose user did not destroy
// the process groups.
void shutdown_all_engines();

}  // namespace powersgd
