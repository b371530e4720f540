// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <array>
#include <chrono>
#include <memory>
#include <thread>

#include "engine/channels.h"
#include "engine/engine.h"

namespace powersgd {

// The engine over a backend whose collectives block the host (Gloo, MPI).
//
// It is a pipeline of two worker threads, each first in, first out and each with a channel of its
// own. One runs the jobs' first parts, the other their second parts. While the Q payload of a
// bucket is on the wire, the next bucket is projected and its P sent. The order on each channel is
// that of submission and never depends on timing. The workers start with the first job.
//
// Nothing here can hang a process. A collective in flight cannot be interrupted. Workers that do
// not end within the grace period are left behind with all that they use, and end by themselves at
// the inner backend's timeout.
class ThreadEngine final : public Engine {
 public:
  ThreadEngine(int rank, std::shared_ptr<Channels> channels, Grace grace = {});
  ~ThreadEngine() override;

  c10::intrusive_ptr<c10d::Work> submit(std::vector<at::Tensor> tensors, Job job,
                                        c10::Device device,
                                        std::chrono::milliseconds timeout) override;
  void connect(c10::Device device) override;
  void flush() override {}  // it puts nothing off
  void shutdown() override;
  void abort() override;

 private:
  struct Shared;  // used by the workers, and may outlive the engine

  friend void shutdown_all_engines();

  void start_workers();  // unless they run; under the mutex of shared_
  // Refuses new jobs. Those in flight have `grace`, or what is left of an earlier one, to end.
  void close(std::chrono::milliseconds grace);
  void fail_queued();
  // Waits for the workers until the grace ends. Several threads may wait. The first that returns
  // joins the workers or leaves them behind.
  void end_workers();

  const int rank_;
  const Grace grace_;
  const std::shared_ptr<Shared> shared_;
  std::array<std::thread, 2> workers_;  // under the mutex of shared_
};

// Shuts down every engine of the process, all at once.
void shutdown_all_engines();

}  // namespace powersgd
