// SPDX-License-Identifier: BSD-3-Clause
#include "engine/work.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "engine/callback_threads.h"
#include "engine/profiler_context.h"

namespace powersgd {

namespace {

// Makes a future of these tensors. On an accelerator it orders its users' streams as well.
c10::intrusive_ptr<c10::ivalue::Future> make_future(const std::vector<at::Tensor>& tensors) {
  std::vector<c10::Device> devices;
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.is_cpu()) devices.push_back(tensor.device());
  }
  return c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                  std::move(devices));
}

std::vector<c10::Stream> streams_from_pool(const std::vector<c10::Device>& devices) {
  std::vector<c10::Stream> streams;
  for (const c10::Device device : devices) {
    streams.push_back(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device));
  }
  return streams;
}

// A profiler shows a Work by this name, from its submission to its end.
constexpr const char* kSpan = "powersgd:all_reduce";

}  // namespace

WorkPowerSGD::WorkPowerSGD(int rank, std::vector<at::Tensor> tensors)
    : Work(rank, c10d::OpType::ALLREDUCE, profiler_outlasts_work() ? kSpan : nullptr, tensors),
      tensors_(std::move(tensors)),
      future_(make_future(tensors_)) {}

void WorkPowerSGD::complete(std::exception_ptr error) {
  finish(error);
  run_callback([future = future_, tensors = tensors_, error = std::move(error)] {
    if (error) {
      future->setError(error);
    } else {
      future->markCompleted(c10::IValue(tensors));
    }
  });
}

std::vector<at::Tensor> WorkPowerSGD::result() {
  TORCH_CHECK(isCompleted(), "Work needs to be completed before calling result().");
  if (const std::exception_ptr error = exception()) std::rethrow_exception(error);
  return tensors_;
}

StreamWork::StreamWork(int rank, std::vector<at::Tensor> tensors, std::function<void()> flush)
    : Work(rank, c10d::OpType::ALLREDUCE, kSpan, tensors),
      tensors_(std::move(tensors)),
      flush_(std::move(flush)),
      future_(make_future(tensors_)) {}

StreamWork::StreamWork(int rank, std::vector<at::Tensor> tensors, c10::Event done,
                       std::exception_ptr error)
    : StreamWork(rank, std::move(tensors), nullptr) {
  enqueued(std::move(done), std::move(error));
  complete_future();
}

void StreamWork::enqueued(c10::Event done, std::exception_ptr error) {
  done_.emplace(std::move(done));
  error_ = std::move(error);
  enqueued_ = true;
  if (recordFunctionEndCallback_) recordFunctionEndCallback_();
}

void StreamWork::complete_future() {
  if (error_) {
    future_->setError(error_);
  } else {
    future_->markCompleted(c10::IValue(tensors_));  // records the current stream
  }
}

void StreamWork::ensure_enqueued() const {
  if (enqueued_) return;
  flush_();
  TORCH_INTERNAL_ASSERT(enqueued_);
}

bool StreamWork::isCompleted() {
  ensure_enqueued();
  return error_ || done_->query();
}

std::exception_ptr StreamWork::exception() const {
  ensure_enqueued();
  return error_;
}

bool StreamWork::wait(std::chrono::milliseconds /*timeout*/) {
  ensure_enqueued();
  // Even if the job failed: a capture ends only if its streams have joined. An aborted job has no
  // event.
  if (done_->was_marked_for_recording()) synchronize();
  if (error_) std::rethrow_exception(error_);
  return true;
}

void StreamWork::synchronize() {
  ensure_enqueued();
  const c10::Device device = done_->device();  // the current device may be another
  done_->block(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
}

c10::intrusive_ptr<c10::ivalue::Future> StreamWork::getFuture() {
  ensure_enqueued();
  return future_;
}

std::vector<at::Tensor> StreamWork::result() {
  ensure_enqueued();
  return tensors_;
}

CombinedWork::CombinedWork(std::vector<c10::intrusive_ptr<c10d::Work>> works,
                           std::vector<at::Tensor> tensors)
    : Work(/*rank=*/-1, c10d::OpType::COALESCED),
      works_(std::move(works)),
      tensors_(std::move(tensors)) {}

bool CombinedWork::isCompleted() {
  return std::all_of(works_.begin(), works_.end(),
                     [](const auto& work) { return work->isCompleted(); });
}

bool CombinedWork::isSuccess() const {
  return std::all_of(works_.begin(), works_.end(),
                     [](const auto& work) { return work->isSuccess(); });
}

std::exception_ptr CombinedWork::exception() const {
  for (const auto& work : works_) {
    if (std::exception_ptr error = work->exception()) return error;
  }
  return nullptr;
}

bool CombinedWork::wait(std::chrono::milliseconds timeout) {
  for (const auto& work : works_) work->wait(timeout);
  return true;
}

std::vector<at::Tensor> CombinedWork::result() {
  std::vector<at::Tensor> tensors;
  for (const auto& work : works_) {
    for (at::Tensor& tensor : work->result()) tensors.push_back(std::move(tensor));
  }
  return tensors_.empty() ? tensors : tensors_;
}

void CombinedWork::synchronize() {
  for (const auto& work : works_) work->synchronize();
}

c10::intrusive_ptr<c10::ivalue::Future> CombinedWork::getFuture() {
  auto future = make_future(tensors_);
  const auto self = c10::intrusive_ptr<CombinedWork>::unsafe_reclaim_from_nonowning(this);
  run_callback([self, future] {
    // The current streams of that thread are the default ones, on which the user may compute.
    const c10::MultiStreamGuard guard(streams_from_pool(future->devices()));
    std::exception_ptr error;
    try {
      self->wait();
    } catch (...) {
      error = std::current_exception();
    }
    if (error) {
      future->setError(error);
    } else {
      future->markCompleted(c10::IValue(self->result()));  // records the streams that waited
    }
  });
  return future;
}

}  // namespace powersgd
