// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <chrono>
#include <memory>

#include "engine/connection.h"
#include "engine/engine.h"

namespace powersgd {

class Pipeline;

// The engine over a backend whose collectives block the host (Gloo, MPI).
//
// One worker thread runs the parts of all jobs, one part at a time. A part that begins a collective
// does not wait for it: the worker goes on with another job. For each part, a thread waits for the
// collectives that the part has begun, one after the other. So the collectives of all jobs are in
// flight at once, and a job waits only for its own. Parts that lead to more messages run first.
//
// Jobs begin and end in the order of submission. Their parts in between may run in any order; no
// result depends on it. The threads start with the first job that needs them.
//
// Nothing here can hang a process. Threads that do not end within the grace period are left behind
// with all that they use, and end by themselves at the backend's timeout.
class ThreadEngine final : public Engine {
 public:
  ThreadEngine(int rank, std::shared_ptr<Connection> connection, Grace grace = {});
  ~ThreadEngine() override;

  c10::intrusive_ptr<c10d::Work> submit(std::vector<at::Tensor> tensors, Job job,
                                        c10::Device device,
                                        std::chrono::milliseconds timeout) override;
  void connect(c10::Device device) override;
  void flush() override {}  // it puts nothing off
  void shutdown() override;
  void abort() override;
  void wait_for_end(c10::Device device) override;

 private:
  friend void shutdown_all_engines();

  const int rank_;
  const Grace grace_;
  const std::shared_ptr<Pipeline> pipeline_;
};

// Shuts down every engine of the process, all at once.
void shutdown_all_engines();

}  // namespace powersgd
