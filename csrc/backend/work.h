// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <exception>
#include <functional>
#include <vector>

namespace powersgd {

// The Work of a compressed allreduce: wait, isCompleted, exception, getFuture and result behave as
// ProcessGroupGloo's do. Completed exactly once, by its engine, on any thread.
class WorkPowerSGD : public c10d::Work {
 public:
  WorkPowerSGD(int rank, std::vector<at::Tensor> tensors);

  // Wakes those who wait, then completes the future on another thread: a callback may itself wait
  // for a later allreduce, which this thread has yet to run.
  void complete(std::exception_ptr error = nullptr);

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  std::vector<at::Tensor> result() override;

 private:
  const std::vector<at::Tensor> tensors_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// Several works as one: it ends with the last of them and fails with the first that failed.
class CombinedWork : public c10d::Work {
 public:
  explicit CombinedWork(std::vector<c10::intrusive_ptr<c10d::Work>> works);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  std::vector<at::Tensor> result() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  const std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

}  // namespace powersgd
