// SPDX-License-Identifier: BSD-3-Clause
#include "ranks/thread_backend.h"

#include <ATen/ATen.h>

namespace powersgd::test {
namespace {

using c10d::OpType;
using c10d::ReduceOp;
using Tensors = ThreadGroup::Tensors;

// A Work that is complete when its maker returns it.
class DoneWork : public c10d::Work {
 public:
  DoneWork(int rank, OpType type, Tensors tensors, const std::exception_ptr& error)
      : Work(rank, type),
        tensors_(std::move(tensors)),
        future_(c10::make_intrusive<c10::ivalue::Future>(
            c10::ListType::create(c10::TensorType::get()))) {
    finish(error);
    if (error) {
      future_->setError(error);
    } else {
      future_->markCompleted(c10::IValue(tensors_));
    }
  }
  Tensors result() override { return tensors_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  const Tensors tensors_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// A Work that waits for a message.
class ReceiveWork : public c10d::Work {
 public:
  using Address = ThreadGroup::Address;
  ReceiveWork(std::shared_ptr<ThreadGroup> group, const Address& address, at::Tensor tensor,
              std::chrono::milliseconds timeout)
      : Work(address.to, OpType::RECV),
        group_(std::move(group)),
        address_(address),
        tensor_(std::move(tensor)),
        timeout_(timeout) {}

  bool wait(std::chrono::milliseconds timeout) override {
    const at::Tensor message =
        group_->receive(address_, timeout == kNoTimeout ? timeout_ : timeout, aborted_);
    if (!message.defined()) return false;
    TORCH_CHECK(message.numel() == tensor_.numel(), "recv: a message of ", message.numel(),
                " elements for ", tensor_.numel());
    tensor_.copy_(message);
    return true;
  }
  void abort() override {
    aborted_ = true;
    group_->wake();
  }

 private:
  const std::shared_ptr<ThreadGroup> group_;
  const Address address_;
  at::Tensor tensor_;
  const std::chrono::milliseconds timeout_;
  std::atomic<bool> aborted_{false};
};

// Marks a backend as in use during one call. A second call meanwhile is an error.
class InUse {
 public:
  explicit InUse(std::atomic<bool>& flag) : flag_(flag) {
    TORCH_CHECK(!flag_.exchange(true),
                "two threads are in one ThreadBackend at once: Gloo would corrupt their data");
  }
  ~InUse() { flag_ = false; }
  InUse(const InUse&) = delete;
  InUse& operator=(const InUse&) = delete;

 private:
  std::atomic<bool>& flag_;
};

std::string describe(const std::string& operation, const Tensors& tensors) {
  std::string text = operation;
  for (const auto& tensor : tensors) {
    text += c10::str(" ", tensor.scalar_type(), "[", tensor.numel(), "]");
  }
  return text;
}

Tensors copies(const Tensors& tensors) {
  Tensors result;
  for (const auto& tensor : tensors) result.push_back(tensor.detach().clone());
  return result;
}

void accumulate(at::Tensor& sum, const at::Tensor& next, ReduceOp::RedOpType op) {
  if (op == ReduceOp::MAX) {
    at::maximum_out(sum, sum, next);
    return;
  }
  TORCH_CHECK(op == ReduceOp::SUM || op == ReduceOp::AVG, "ThreadBackend does not know reduce op ",
              static_cast<int>(op));
  sum.add_(next);
}

// Returns the reduction of every rank's i-th tensor, in rank order.
at::Tensor reduction(const std::vector<Tensors>& all, size_t i, const ReduceOp& op) {
  at::Tensor sum = all.front()[i].clone();
  for (size_t rank = 1; rank < all.size(); ++rank) accumulate(sum, all[rank][i], op);
  if (op.op_ == ReduceOp::AVG) sum.div_(static_cast<double>(all.size()));
  return sum;
}

void check_dense(const std::string& operation, const Tensors& tensors) {
  TORCH_CHECK(!tensors.empty(), operation, ": no tensor");
  for (const auto& tensor : tensors) {
    TORCH_CHECK(tensor.layout() == at::kStrided && tensor.is_non_overlapping_and_dense(), operation,
                ": ThreadBackend takes dense tensors without holes only");
  }
}

}  // namespace

ThreadBackend::ThreadBackend(int rank, std::shared_ptr<ThreadGroup> group)
    : Backend(rank, group->size()), group_(std::move(group)) {}

std::vector<ThreadBackend::Call> ThreadBackend::calls() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return calls_;
}

void ThreadBackend::on_call(std::function<void(const Call&)> hook) {
  const std::lock_guard<std::mutex> lock(mutex_);
  hook_ = std::move(hook);
}

void ThreadBackend::inject_failure(int64_t nth_allreduce) {
  const std::lock_guard<std::mutex> lock(mutex_);
  allreduces_until_failure_ = nth_allreduce;
}

void ThreadBackend::kill(const std::string& why) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (cause_of_death_.empty()) cause_of_death_ = why;
  }
  group_->fail(c10::str("rank ", getRank(), " is gone: ", why));
}

void ThreadBackend::check_alive(const std::string& operation) {
  bool now = false;
  if (operation == "allreduce") {
    const std::lock_guard<std::mutex> lock(mutex_);
    now = allreduces_until_failure_ == 0;
    allreduces_until_failure_ -= allreduces_until_failure_ >= 0 ? 1 : 0;
  }
  if (now) kill("injected failure");
  const std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(cause_of_death_.empty(), operation, " on rank ", getRank(), ": ", cause_of_death_);
}

ThreadBackend::WorkPtr ThreadBackend::run(const std::string& operation, const Tensors& tensors,
                                          OpType type, const std::function<void()>& body) {
  const InUse in_use(in_use_);
  const at::NoGradGuard no_grad;
  Call call{operation, 0, tensors.empty() ? at::kByte : tensors.front().scalar_type()};
  for (const auto& tensor : tensors) call.numel += tensor.numel();
  std::function<void(const Call&)> hook;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    calls_.push_back(call);
    hook = hook_;
  }
  if (hook) hook(call);
  check_alive(operation);
  std::exception_ptr error;
  try {
    body();
  } catch (...) {
    error = std::current_exception();
  }
  return c10::make_intrusive<DoneWork>(getRank(), type, tensors, error);
}

// `signature` holds tensors that are alike on all ranks. A mismatch shows in it.
std::vector<Tensors> ThreadBackend::exchange(const std::string& operation, const Tensors& signature,
                                             Tensors tensors, Milliseconds timeout) {
  return group_->exchange(getRank(), describe(operation, signature), std::move(tensors),
                          timeout == c10d::kUnsetTimeout ? options_->timeout : timeout);
}

void ThreadBackend::reduce_in_place(const std::string& operation, Tensors& tensors,
                                    const c10d::AllreduceOptions& opts) {
  const std::string op = c10::str(operation, " op ", static_cast<int>(opts.reduceOp.op_));
  const auto all = exchange(op, tensors, copies(tensors), opts.timeout);
  for (size_t i = 0; i < tensors.size(); ++i) tensors[i].copy_(reduction(all, i, opts.reduceOp));
}

ThreadBackend::WorkPtr ThreadBackend::allreduce(Tensors& tensors,
                                                const c10d::AllreduceOptions& opts) {
  check_dense("allreduce", tensors);
  TORCH_CHECK(tensors.size() == 1, "allreduce: one tensor at a time, got ", tensors.size());
  return run("allreduce", tensors, OpType::ALLREDUCE,
             [&] { reduce_in_place("allreduce", tensors, opts); });
}

ThreadBackend::WorkPtr ThreadBackend::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  check_dense("allreduce_coalesced", tensors);
  return run("allreduce_coalesced", tensors, OpType::ALLREDUCE_COALESCED,
             [&] { reduce_in_place("allreduce_coalesced", tensors, opts); });
}

ThreadBackend::WorkPtr ThreadBackend::broadcast(Tensors& tensors,
                                                const c10d::BroadcastOptions& opts) {
  check_dense("broadcast", tensors);
  return run("broadcast", tensors, OpType::BROADCAST, [&] {
    const bool root = opts.rootRank == getRank();
    const auto all = exchange(c10::str("broadcast from ", opts.rootRank), tensors,
                              root ? copies(tensors) : Tensors(), opts.timeout);
    for (size_t i = 0; i < tensors.size(); ++i) tensors[i].copy_(all[opts.rootRank][i]);
  });
}

ThreadBackend::WorkPtr ThreadBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                      const c10d::AllgatherOptions& opts) {
  TORCH_CHECK(output.is_contiguous() && output.numel() == input.numel() * getSize(),
              "_allgather_base: the output has ", output.numel(), " elements");
  return run("_allgather_base", {input}, OpType::_ALLGATHER_BASE, [&] {
    const auto all = exchange("_allgather_base", {input}, copies({input}), opts.timeout);
    at::Tensor rows = output.view({getSize(), -1});
    for (size_t rank = 0; rank < all.size(); ++rank) rows[rank].copy_(all[rank][0].flatten());
  });
}

ThreadBackend::WorkPtr ThreadBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                    std::vector<int64_t>& output_splits,
                                                    std::vector<int64_t>& input_splits,
                                                    const c10d::AllToAllOptions& opts) {
  TORCH_CHECK(output_splits.empty() && input_splits.empty(), "alltoall_base: parts of equal size");
  TORCH_CHECK(
      output.is_contiguous() && output.numel() == input.numel() && input.numel() % getSize() == 0,
      "alltoall_base: ", input.numel(), " elements in, ", output.numel(), " out");
  return run("alltoall_base", {input}, OpType::ALLTOALL_BASE, [&] {
    const auto all = exchange("alltoall_base", {input}, copies({input}), opts.timeout);
    at::Tensor parts = output.view({getSize(), -1});
    for (size_t rank = 0; rank < all.size(); ++rank) {
      parts[rank].copy_(all[rank][0].view({getSize(), -1})[getRank()]);
    }
  });
}

ThreadBackend::WorkPtr ThreadBackend::barrier(const c10d::BarrierOptions& opts) {
  return run("barrier", {}, OpType::BARRIER, [&] { exchange("barrier", {}, {}, opts.timeout); });
}

ThreadBackend::WorkPtr ThreadBackend::send(Tensors& tensors, int to, int tag) {
  check_dense("send", tensors);
  return run("send", tensors, OpType::SEND,
             [&] { group_->send({getRank(), to, tag}, tensors[0].detach().clone()); });
}

ThreadBackend::WorkPtr ThreadBackend::recv(Tensors& tensors, int from, int tag) {
  check_dense("recv", tensors);
  run("recv", tensors, OpType::RECV, [] {});
  auto work = c10::make_intrusive<ReceiveWork>(group_, ThreadGroup::Address{from, getRank(), tag},
                                               tensors[0], options_->timeout);
  if (to_receive_) to_receive_->push_back(work);
  return work;
}

ThreadBackend::WorkPtr ThreadBackend::endCoalescing() {
  const auto works = std::exchange(to_receive_, std::nullopt).value();
  return run("endCoalescing", {}, OpType::COALESCED, [&] {
    for (const WorkPtr& work : works) work->wait();
  });
}

ThreadBackends make_thread_backends(int size) {
  const auto group = std::make_shared<ThreadGroup>(size);
  ThreadBackends backends;
  for (int rank = 0; rank < size; ++rank) {
    backends.push_back(c10::make_intrusive<ThreadBackend>(rank, group));
  }
  return backends;
}

}  // namespace powersgd::test
