// SPDX-License-Identifier: BSD-3-Clause
#include "backend/work.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "backend/callback_threads.h"

namespace powersgd {

WorkPowerSGD::WorkPowerSGD(int rank, std::vector<at::Tensor> tensors)
    : Work(rank, c10d::OpType::ALLREDUCE, "powersgd:all_reduce", tensors),
      tensors_(std::move(tensors)),
      future_(c10::make_intrusive<c10::ivalue::Future>(
          c10::ListType::create(c10::TensorType::get()))) {}

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

CombinedWork::CombinedWork(std::vector<c10::intrusive_ptr<c10d::Work>> works)
    : Work(/*rank=*/-1, c10d::OpType::COALESCED), works_(std::move(works)) {}

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
  return tensors;
}

c10::intrusive_ptr<c10::ivalue::Future> CombinedWork::getFuture() {
  auto future = c10::make_intrusive<c10::ivalue::Future>(
      c10::ListType::create(c10::TensorType::get()));
  run_callback([works = works_, future] {
    try {
      std::vector<at::Tensor> tensors;
      for (const auto& work : works) {
        work->wait();
        for (at::Tensor& tensor : work->result()) tensors.push_back(std::move(tensor));
      }
      future->markCompleted(c10::IValue(std::move(tensors)));
    } catch (...) {
      future->setError(std::current_exception());
    }
  });
  return future;
}

}  // namespace powersgd
