// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/Event.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <exception>
#include <functional>
#include <vector>

namespace powersgd {

// The Work of a thread engine. wait, isCompleted, exception, getFuture and result behave as those
// of ProcessGroupGloo. Its engine completes it exactly once, on any thread.
class WorkPowerSGD : public c10d::Work {
 public:
  WorkPowerSGD(int rank, std::vector<at::Tensor> tensors);

  // Wakes the waiters, then completes the future on another thread. A callback may itself wait for
  // a later allreduce, which this thread has yet to run.
  void complete(std::exception_ptr error = nullptr);

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  std::vector<at::Tensor> result() override;

 private:
  const std::vector<at::Tensor> tensors_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// The Work of a stream engine. wait() makes the caller's stream wait and returns at once. The
// future carries the device's events. The Work is completed once the device has ended the job.
class StreamWork : public c10d::Work {
 public:
  // Made while the stream that `done` was recorded on is current.
  StreamWork(int rank, std::vector<at::Tensor> tensors, c10::Event done, std::exception_ptr error);

  bool isCompleted() override;
  bool isSuccess() const override { return !error_; }
  std::exception_ptr exception() const override { return error_; }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  std::vector<at::Tensor> result() override { return tensors_; }

 private:
  const std::vector<at::Tensor> tensors_;
  c10::Event done_;
  const std::exception_ptr error_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
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
