// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <functional>
#include <utility>
#include <vector>

namespace powersgd {

// The inner backend as a job sees it.
class Channel {
 public:
  virtual ~Channel() = default;
  // Sums `payload` over the ranks in place, in order with what the job does before and after.
  virtual void allreduce(at::Tensor& payload) = 0;
};

// A job has two parts, each with one channel: that of a step's P payload, then that of its Q payload.
// An engine may run the first part of a job beside the second part of the one before.
struct Job {
  std::function<void(Channel&)> first;  // may be null
  std::function<void(Channel&)> second;
  // Identifies what the job changes. Jobs that share an object do not overlap.
  std::vector<const void*> changes;
  bool alone = false;  // overlaps with no other job
};

// One that runs after all jobs before it, and before all after it.
inline Job job_alone(std::function<void(Channel&)> body) { return {{}, std::move(body), {}, true}; }

// Runs jobs in the order of submission, which is the same on all ranks: on each channel, the
// collectives come in that order, whatever the timing. What a part throws becomes the exception of
// the job's Work; the second part is not run if the first has thrown.
class Engine {
 public:
  virtual ~Engine() = default;

  // Returns at once. `tensors` are what the job reads and writes, and the Work's result; they lie
  // on `device`, after what the caller's current stream does. The job's collectives use `timeout`,
  // or the backend's own where it is unset.
  virtual c10::intrusive_ptr<c10d::Work> submit(std::vector<at::Tensor> tensors, Job job,
                                                c10::Device device,
                                                std::chrono::milliseconds timeout) = 0;

  // Refuses new jobs and lets those submitted end, within a bound.
  virtual void shutdown() = 0;

  // Refuses new jobs and fails those not yet begun.
  virtual void abort() = 0;
};

// What submit throws after shutdown or abort.
[[noreturn]] void throw_closed();

}  // namespace powersgd
