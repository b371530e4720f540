// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <functional>
#include <vector>

namespace powersgd {

// The inner backend as a job sees it.
class Lane {
 public:
  virtual ~Lane() = default;
  // Sums `payload` over the ranks in place, in order with what the job does before and after.
  virtual void allreduce(at::Tensor& payload) = 0;
};

// Runs jobs one after the other, in the order of submission, which is the same on all ranks. What a
// job throws becomes the exception of its Work.
class Engine {
 public:
  using Job = std::function<void(Lane&)>;

  virtual ~Engine() = default;

  // Returns at once. `tensors` are what the job reads and writes, and the Work's result; the job's
  // collectives use `timeout`, or the backend's own where it is unset.
  virtual c10::intrusive_ptr<c10d::Work> submit(std::vector<at::Tensor> tensors, Job job,
                                                std::chrono::milliseconds timeout) = 0;

  // Refuses new jobs and lets those submitted end, within a bound.
  virtual void shutdown() = 0;

  // Refuses new jobs and fails those not yet begun.
  virtual void abort() = 0;
};

}  // namespace powersgd
