// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/Event.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <exception>
#include <functional>
#include <optional>
#include <vector>

namespace powersgd {

// The Work of a thread engine. wait, isCompleted, exception, getFuture and result behave as those
// of ProcessGroupGloo. Its engine completes it exactly once, on any thread.
class WorkPowerSGD : public c10d::Work {
 public:
  WorkPowerSGD(int rank, std::vector<at::Tensor> tensors);

  // Wakes the waiters, then completes the future on another thread, because a callback may itself
  // wait for a later allreduce that this thread has yet to run.
  void complete(std::exception_ptr error = nullptr);

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  std::vector<at::Tensor> result() override;

 private:
  const std::vector<at::Tensor> tensors_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// The Work of a stream engine. wait() makes the caller's stream wait and returns at once. The
// future carries the device's events. The Work is completed once the device has ended the job.
//
// Part of the job may still be deferred when the Work is made. Waiting for the Work, or asking for
// its state or future, enqueues that part first. The engine guarantees that every waiter wakes: it
// enqueues the part or fails it at the latest when the engine ends.
class StreamWork : public c10d::Work {
 public:
  // Makes the Work of a job that is yet to be enqueued. When `flush` returns, it has been.
  StreamWork(int rank, std::vector<at::Tensor> tensors, std::function<void()> flush);
  // Makes the Work of an enqueued job, while the stream that `done` was recorded on is current.
  StreamWork(int rank, std::vector<at::Tensor> tensors, c10::Event done, std::exception_ptr error);

  // Notes that all of the job is enqueued, or why it is not. Called once.
  void enqueued(c10::Event done, std::exception_ptr error);
  // Completes the future after that, while the stream that `done` was recorded on is current.
  void complete_future();

  const std::vector<at::Tensor>& tensors() const { return tensors_; }
  // Returns the future without enqueuing anything, for a caller that waits only after a later
  // flush.
  c10::intrusive_ptr<c10::ivalue::Future> future_without_flush() const { return future_; }

  bool isCompleted() override;
  bool isSuccess() const override { return !exception(); }
  std::exception_ptr exception() const override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  std::vector<at::Tensor> result() override;

 private:
  void ensure_enqueued() const;

  const std::vector<at::Tensor> tensors_;
  const std::function<void()> flush_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::optional<c10::Event> done_;
  std::exception_ptr error_;
  std::atomic<bool> enqueued_{false};  // done_ and error_ are final
};

// Several works as one: it ends with the last of them and fails with the first that failed.
class CombinedWork : public c10d::Work {
 public:
  // If the works' results are known, they are `tensors`, and the future carries their devices'
  // events.
  explicit CombinedWork(std::vector<c10::intrusive_ptr<c10d::Work>> works,
                        std::vector<at::Tensor> tensors = {});

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override;
  std::vector<at::Tensor> result() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  const std::vector<c10::intrusive_ptr<c10d::Work>> works_;
  const std::vector<at::Tensor> tensors_;
};

}  // namespace powersgd
