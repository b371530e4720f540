// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "powersgd/core/hosts.h"

namespace powersgd {

// The communicator of a job. All tensors are contiguous. A gather or an all-to-all is among
// `members`, in their order, or among all ranks if it is null.
//
// A collective begins when it is called, after the job's own operations, and has ended when the
// next part of the job runs. Until then, the part must not touch its tensors or begin another
// collective.
class Channel {
 public:
  virtual ~Channel() = default;
  // Sums `payload` over the ranks in place.
  virtual void allreduce(at::Tensor& payload) = 0;
  // Fills `output` with the `input` of all ranks, in the order of the ranks. `input` may be this
  // rank's part of `output`.
  virtual void allgather(at::Tensor& output, at::Tensor& input, const Members* members) = 0;
  // Cuts `input` into one equal part for each rank. Fills `output` with the parts for this rank, in
  // the order of the ranks that sent them.
  virtual void alltoall(at::Tensor& output, at::Tensor& input, const Members* members) = 0;
};

// What an engine runs: a sequence of parts, each of which may begin a collective. While the
// collective is in flight, the engine runs parts of other jobs.
struct Job {
  std::vector<std::function<void(Channel&)>> parts;
  // The number of parts that a stream engine may overlap with later parts of the previous job.
  size_t parts_ahead = 0;
  // Called once if a part that has begun, or a collective, fails.
  std::function<void()> undo;
  // Called where the time of a collective is spent: on the thread that waits for it or enqueues it.
  // What it returns lives until that has ended.
  std::function<std::shared_ptr<void>()> observe;
  // The addresses of the objects that the job changes. Jobs that share one do not overlap.
  std::vector<const void*> changes;
  // Identifies jobs that run the same collectives on the same buffers, so that the receives of one
  // can be posted while the previous one runs. They share an object that they change. Null: the
  // job is alone, or runs no collective.
  std::shared_ptr<const void> exchange;
  // Overlaps with no other job. Its all-reduces have ended when they return.
  bool alone = false;
  // The submitter promises to submit another job, or to call flush(), in the same backward pass.
  bool more_follow = false;
  // The job has no collective, and may run before later parts of an earlier job. So a single rank
  // may submit it at any time without changing the order of other jobs' collectives.
  bool local = false;
};

// Makes a job of one part that overlaps with no other job.
inline Job job_alone(std::function<void(Channel&)> body) {
  Job job;
  job.parts.push_back(std::move(body));
  job.alone = true;
  return job;
}

// How long jobs in flight may take to end: at a shutdown, and at an abort, when peers no longer
// answer.
struct Grace {
  std::chrono::milliseconds shutdown = std::chrono::seconds(10);
  std::chrono::milliseconds abort = std::chrono::seconds(1);
};

// Purpose: runs the jobs of one device type, without blocking the thread that submits them.
//
// Contract: jobs begin and end in the order of submission, which is the same on all ranks. An
// exception from a part or a collective becomes the Work's, and later parts do not run.
//
// Ownership: an engine keeps a job, its tensors and its channel until the job has ended.
//
// Threads: submit() may be called from any thread. Ranks that submit from several threads must
// agree on the order themselves.
class Engine {
 public:
  virtual ~Engine() = default;

  // Returns at once. The job reads and writes `tensors`, which are also the Work's result. They are
  // on `device`, and ready when the caller's current stream gets there. The job's collectives use
  // `timeout`, or the backend's own if it is unset.
  [[nodiscard]] virtual c10::intrusive_ptr<c10d::Work> submit(
      std::vector<at::Tensor> tensors, Job job, c10::Device device,
      std::chrono::milliseconds timeout) = 0;

  // Connects to the other ranks ahead of the first job on `device` that communicates, if the engine
  // has a channel of its own. All ranks must call it. Returns at once.
  virtual void connect(c10::Device device) = 0;

  // Begins the parts of submitted jobs that were deferred because more jobs were to follow.
  virtual void flush() = 0;

  // Refuses new jobs and lets submitted ones end, up to a time limit.
  virtual void shutdown() = 0;

  // Refuses new jobs and fails those that have not begun.
  virtual void abort() = 0;

  // After either, waits until nothing that was submitted can run or be undone any more, on the host
  // or on `device`. That may take as long as the backend's timeout.
  virtual void wait_for_end(c10::Device device) = 0;
};

// Returns the error of a job that did not run because of shutdown or abort.
std::exception_ptr closed_error();

// Throws the error of a submit() after shutdown or abort.
[[noreturn]] void throw_closed();

}  // namespace powersgd
