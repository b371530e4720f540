// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <exception>
#include <functional>
#include <utility>
#include <vector>

namespace powersgd {

// The communicator of a job. All tensors are contiguous. A collective comes in order with the job's
// own operations.
class Channel {
 public:
  virtual ~Channel() = default;
  // Sums `payload` over the ranks in place.
  virtual void allreduce(at::Tensor& payload) = 0;
  // Makes `output` the `input` of all ranks, one after the other.
  virtual void allgather(at::Tensor& output, at::Tensor& input) = 0;
  // Cuts `input` into one equal part for each rank. Makes `output` the parts for this rank, in the
  // order of the ranks that they come from.
  virtual void alltoall(at::Tensor& output, at::Tensor& input) = 0;
};

// A job has two parts, each with a channel of its own: the first part sums a step's P payload, the
// second its Q payload. An engine may run the first part of a job beside the second part of the job
// before it.
struct Job {
  std::function<void(Channel&)> first;  // may be null
  std::function<void(Channel&)> second;
  // The addresses of the objects that the job changes. Jobs that share one do not overlap.
  std::vector<const void*> changes;
  bool alone = false;  // overlaps with no other job
  // The submitter promises to submit another job, or to call flush(), in the same backward pass.
  bool more_follow = false;
  // The job has no collective, and may run before the second part of an earlier job. So a single
  // rank may submit it at any time, and the order of the other jobs' collectives stays.
  bool local = false;
};

// A job of one part that overlaps with no other job.
inline Job job_alone(std::function<void(Channel&)> body) {
  Job job;
  job.second = std::move(body);
  job.alone = true;
  return job;
}

// The time that jobs in flight have to end: at a shutdown, and at an abort, when peers no longer
// answer.
struct Grace {
  std::chrono::milliseconds shutdown = std::chrono::seconds(10);
  std::chrono::milliseconds abort = std::chrono::seconds(1);
};

// Purpose: runs the jobs of one device type, without blocking the thread that submits them.
//
// Contract: jobs run in the order of submission, which is the same on all ranks. So the collectives
// of a channel come in that order, whatever the timing. An exception of a part becomes that of the
// job's Work. If the first part throws, the second one does not run.
//
// Ownership: an engine keeps a job, its tensors and its channels until the job has ended.
//
// Threads: submit() may be called from any thread. Ranks that submit from several threads must
// agree on the order themselves.
class Engine {
 public:
  virtual ~Engine() = default;

  // Returns at once. The job reads and writes `tensors`, which are also the Work's result. They lie
  // on `device` and are ready when the caller's current stream gets there. The job's collectives
  // use `timeout`, or the backend's own if it is unset.
  virtual c10::intrusive_ptr<c10d::Work> submit(std::vector<at::Tensor> tensors, Job job,
                                                c10::Device device,
                                                std::chrono::milliseconds timeout) = 0;

  // Connects to the other ranks ahead of the first job on `device` that communicates, if the engine
  // has channels. All ranks call it alike. Returns at once.
  virtual void connect(c10::Device device) = 0;

  // Begins the parts of submitted jobs that were put off because more jobs were to follow.
  virtual void flush() = 0;

  // Refuses new jobs and lets those submitted end, within a bound.
  virtual void shutdown() = 0;

  // Refuses new jobs and fails those that have not begun.
  virtual void abort() = 0;
};

// Returns the error of a job that did not run because of shutdown or abort.
std::exception_ptr closed_error();

// Throws the error of a submit() after shutdown or abort.
[[noreturn]] void throw_closed();

}  // namespace powersgd
