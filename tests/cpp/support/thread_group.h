// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace powersgd::test {

constexpr std::chrono::milliseconds kDefaultTimeout{20'000};

// Where the ranks of one group, which are threads of this process, meet. Thread-safe.
class ThreadGroup {
 public:
  using Tensors = std::vector<at::Tensor>;

  explicit ThreadGroup(int size);
  int size() const { return size_; }

  // Hands in `tensors` and returns what every rank handed in, in rank order, once all have. The
  // n-th call of each rank belong together and must describe the same operation. Throws on a
  // difference, a time-out or a failed group; the first two fail the group.
  std::vector<Tensors> exchange(int rank, const std::string& operation, Tensors tensors,
                                std::chrono::milliseconds timeout);

  // A mailbox per (source, destination, tag): post returns at once, take waits.
  void post(int source, int destination, int tag, at::Tensor tensor);
  at::Tensor take(int source, int destination, int tag, std::chrono::milliseconds timeout);

  // Everything that waits or will wait throws `why`. The first failure is the one reported.
  void fail(const std::string& why);

  // The same group for all that ask for the same members for the n-th time.
  std::shared_ptr<ThreadGroup> subgroup(const std::vector<int>& ranks, int nth);

 private:
  struct Round {
    explicit Round(int size) : here(size), tensors(size) {}
    std::string operation;
    std::vector<bool> here;
    std::vector<Tensors> tensors;
    int arrived = 0;
    int left = 0;
  };
  // Waits until `done` holds; if it does not come to that, fails the group and throws.
  void wait_until(std::unique_lock<std::mutex>& lock, std::chrono::milliseconds timeout,
                  const std::function<bool()>& done, const std::function<std::string()>& what);
  void fail_locked(const std::string& why);
  std::string missing_ranks(const Round& round) const;

  const int size_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::string failure_;
  std::vector<int64_t> next_;  // the round that each rank enters next
  std::map<int64_t, Round> rounds_;
  std::map<std::tuple<int, int, int>, std::deque<at::Tensor>> mail_;
  std::map<std::pair<std::vector<int>, int>, std::shared_ptr<ThreadGroup>> subgroups_;
};

// A c10d backend without a network, for CPU tensors. Deterministic: a reduction adds in rank order,
// in the dtype of the tensors, so that all ranks get identical bits.
//
// A collective runs inside the call and blocks until all ranks have come; the Work that it returns
// is complete. What goes wrong on the way (a peer gone, a time-out, a mismatch) is the Work's
// exception, as with Gloo; what is wrong with the arguments, or injected, is thrown by the call.
//
// Stricter than Gloo where Gloo corrupts data: two threads in one ThreadBackend at once, and
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

  ThreadBackend(int rank, std::shared_ptr<ThreadGroup> group,
                c10::intrusive_ptr<Options> options = c10::make_intrusive<Options>());

  // The calls so far, in order.
  std::vector<Call> calls() const;
  // `hook` runs at the start of every call: it may sleep, wait for the test, or throw.
  void on_call(std::function<void(const Call&)> hook);
  // The n-th allreduce from now (0: the next) throws on this rank, and the group fails.
  void inject_failure(int64_t nth_allreduce = 0);
  // This rank is gone: its calls throw, and those of its peers fail at once.
  void kill(const std::string& why = "killed");

  const std::string getBackendName() const override { return "thread"; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return options_; }
  void setTimeout(Milliseconds timeout) override { options_->timeout = timeout; }
  bool supportsSplitting() const override { return true; }
  // As Gloo's: reads the global ranks from its own options, and writes the child's into `options`.
  c10::intrusive_ptr<c10d::Backend> split(
      const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
      const c10::intrusive_ptr<c10d::Backend::Options>& options) override;
  void abort() override { kill("aborted"); }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts = {}) override;
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& opts = {}) override;
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts = {}) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& opts = {}) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& opts = {}) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& opts = {}) override;
  WorkPtr barrier(const c10d::BarrierOptions& opts = {}) override;
  WorkPtr send(Tensors& tensors, int destination, int tag) override;
  WorkPtr recv(Tensors& tensors, int source, int tag) override;

 private:
  // Logs the call and runs `body`; what that throws becomes the Work's exception.
  WorkPtr run(const std::string& operation, const Tensors& tensors, c10d::OpType type,
              const std::function<void()>& body);
  std::vector<Tensors> exchange(const std::string& operation, const Tensors& signature,
                                Tensors tensors, Milliseconds timeout);
  void reduce_in_place(const std::string& operation, Tensors& tensors,
                       const c10d::AllreduceOptions& opts);
  void check_alive(const std::string& operation);

  const std::shared_ptr<ThreadGroup> group_;
  const c10::intrusive_ptr<Options> options_;
  std::atomic<bool> in_use_{false};

  mutable std::mutex mutex_;  // guards what follows
  std::vector<Call> calls_;
  std::function<void(const Call&)> hook_;
  int64_t allreduces_until_failure_ = -1;  // -1: none injected
  std::string dead_;                       // why
  std::map<std::vector<int>, int> splits_;
};

using ThreadBackends = std::vector<c10::intrusive_ptr<ThreadBackend>>;

// The backends of a new group, by rank.
ThreadBackends make_thread_backends(int size);

// Two more groups of the same ranks, for the payloads of a BackendPowerSGD.
class Channels {
 public:
  explicit Channels(int size) : p_(make_thread_backends(size)), q_(make_thread_backends(size)) {}

  std::vector<c10::intrusive_ptr<c10d::Backend>> of(int rank) const {
    return {p_[static_cast<size_t>(rank)], q_[static_cast<size_t>(rank)]};
  }
  ThreadBackend& p(int rank) const { return *p_[static_cast<size_t>(rank)]; }
  ThreadBackend& q(int rank) const { return *q_[static_cast<size_t>(rank)]; }
  // Peers of a rank that threw shall not wait for it.
  void kill(int rank) const {
    p(rank).kill("a rank threw");
    q(rank).kill("a rank threw");
  }

 private:
  const ThreadBackends p_, q_;
};

// Runs fn(rank, backend) on a thread per rank, waits for all, and rethrows the exception that came
// first. A rank that throws, or stops at a failed ASSERT, is killed, so that its peers do not wait
// for it. If the ranks are not done by `limit` the process aborts and says which of them hang.
void run_ranks(int size, const std::function<void(int, c10::intrusive_ptr<ThreadBackend>)>& fn,
               std::chrono::milliseconds limit = std::chrono::seconds(60));

}  // namespace powersgd::test
