// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ranks/thread_group.h"

namespace powersgd::test {

constexpr std::chrono::milliseconds kDefaultTimeout{300'000};

// A c10d backend without a network, for CPU tensors. Deterministic: a reduction adds in rank order,
// in the dtype of the tensors, so that all ranks get identical bits.
//
// A collective runs inside the call and blocks until all ranks have called it. The Work that it
// returns is complete. A failure on the way (a lost peer, a time-out, a mismatch) is the Work's
// exception, as with Gloo. Bad arguments and injected failures are thrown by the call.
//
// It is stricter than Gloo where Gloo corrupts data: two threads in one ThreadBackend at once, and
// tensors with holes in memory, are errors.
class ThreadBackend : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Milliseconds = std::chrono::milliseconds;

  struct Options : c10d::Backend::Options {
    explicit Options(Milliseconds timeout = kDefaultTimeout)
        : c10d::Backend::Options("thread", timeout) {}
  };
  struct Call {
    std::string operation;  // "allreduce", "broadcast", ...
    int64_t numel;
    at::ScalarType dtype;
  };

  ThreadBackend(int rank, std::shared_ptr<ThreadGroup> group);

  // All calls so far, in order.
  std::vector<Call> calls() const;
  // Runs `hook` at the start of every call. It may sleep, wait for the test, or throw.
  void on_call(std::function<void(const Call&)> hook);
  // Makes the n-th allreduce from now (0 is the next) throw on this rank and fail the group.
  void inject_failure(int64_t nth_allreduce = 0);
  // Ends this rank: its calls throw, and those of its peers fail at once.
  void kill(const std::string& why = "killed");

  const std::string getBackendName() const override { return "thread"; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return options_; }
  void setTimeout(Milliseconds timeout) override { options_->timeout = timeout; }
  void abort() override { kill("aborted"); }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts = {}) override;
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& opts = {}) override;
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts = {}) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& opts = {}) override;
  // Parts of equal size alone.
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& opts = {}) override;
  WorkPtr barrier(const c10d::BarrierOptions& opts = {}) override;
  // Messages, whose Works may be waited for by other threads. That of a receive can be aborted.
  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  // Messages in between have arrived when endCoalescing returns.
  void startCoalescing() override { to_receive_.emplace(); }
  WorkPtr endCoalescing() override;

  ThreadGroup& group() const { return *group_; }

 private:
  // Logs the call and runs `body`. An exception becomes the Work's.
  WorkPtr run(const std::string& operation, const Tensors& tensors, c10d::OpType type,
              const std::function<void()>& body);
  std::vector<Tensors> exchange(const std::string& operation, const Tensors& signature,
                                Tensors tensors, Milliseconds timeout);
  void reduce_in_place(const std::string& operation, Tensors& tensors,
                       const c10d::AllreduceOptions& opts);
  void check_alive(const std::string& operation);

  const std::shared_ptr<ThreadGroup> group_;
  const c10::intrusive_ptr<Options> options_ = c10::make_intrusive<Options>();
  std::atomic<bool> in_use_{false};
  std::optional<std::vector<WorkPtr>> to_receive_;  // since startCoalescing

  mutable std::mutex mutex_;  // guards the members below
  std::vector<Call> calls_;
  std::function<void(const Call&)> hook_;
  int64_t allreduces_until_failure_ = -1;  // -1: none injected
  std::string cause_of_death_;             // empty while the rank lives
};

using ThreadBackends = std::vector<c10::intrusive_ptr<ThreadBackend>>;

// Makes the backends of a new group, by rank.
ThreadBackends make_thread_backends(int size);

}  // namespace powersgd::test
