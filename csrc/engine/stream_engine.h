// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <memory>

#include "engine/engine.h"

namespace powersgd {

// The engine over a backend that is ordered by streams (NCCL). It needs no thread and never
// synchronizes the host.
//
// submit() enqueues a job on side streams, which wait for the caller's stream, and returns. Waiting
// for the Work makes the waiter's stream wait for the side streams.
//
// The jobs of a backward pass are a pipeline over two side streams, one for the parts that run
// ahead and one for the others. If `more_follow`, a job's other parts are deferred until the next
// job's parts ahead are enqueued. So a bucket is projected while the previous one is
// orthogonalized, and the collectives of every rank come in the order P0, P1, Q0, P2, Q1, ..., Qn.
// That order depends on the calls alone and never on timing. A job that is alone, or that changes
// an object which an unfinished job changes, begins after the whole pipeline.
//
// The channel is the inner backend that also serves the caller. It runs the collectives of one
// communicator in the order of issue, so the jobs' never overlap with the caller's, and no second
// communicator takes device memory.
class StreamEngine final : public Engine {
 public:
  StreamEngine(int rank, c10::intrusive_ptr<c10d::Backend> channel, Grace grace = {});
  ~StreamEngine() override;

  c10::intrusive_ptr<c10d::Work> submit(std::vector<at::Tensor> tensors, Job job,
                                        c10::Device device,
                                        std::chrono::milliseconds timeout) override;
  void connect(c10::Device) override {}  // the inner backend connects when it is first used
  void flush() override;
  void shutdown() override;
  void abort() override;
  void wait_for_end(c10::Device device) override;

 private:
  struct Shared;  // used by the Works, and may outlive the engine

  const int rank_;
  const Grace grace_;
  const std::shared_ptr<Shared> shared_;
};

}  // namespace powersgd
