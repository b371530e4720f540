// SPDX-License-Identifier: BSD-3-Clause
#include "support/thread_group.h"

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <thread>

#include <gtest/gtest.h>

namespace powersgd::test {

ThreadGroup::ThreadGroup(int size) : size_(size), next_(size) {}

void ThreadGroup::fail_locked(const std::string& why) {
  if (failure_.empty()) failure_ = why;
  changed_.notify_all();
}

void ThreadGroup::fail(const std::string& why) {
  const std::lock_guard<std::mutex> lock(mutex_);
  fail_locked(why);
}

std::string ThreadGroup::missing_ranks(const Round& round) const {
  std::string ranks;
  for (int rank = 0; rank < size_; ++rank) {
    if (!round.here[rank]) ranks += c10::str(ranks.empty() ? "" : ", ", rank);
  }
  return ranks;
}

void ThreadGroup::wait_until(std::unique_lock<std::mutex>& lock, std::chrono::milliseconds timeout,
                             const std::function<bool()>& done,
                             const std::function<std::string()>& what) {
  changed_.wait_for(lock, timeout, [&] { return done() || !failure_.empty(); });
  if (done()) return;
  if (failure_.empty()) {
    fail_locked(c10::str(what(), " timed out after ", timeout.count(), " ms"));
  }
  TORCH_CHECK(false, failure_);
}

std::vector<ThreadGroup::Tensors> ThreadGroup::exchange(int rank, const std::string& operation,
                                                        Tensors tensors,
                                                        std::chrono::milliseconds timeout) {
  std::unique_lock<std::mutex> lock(mutex_);
  TORCH_CHECK(failure_.empty(), failure_);
  const int64_t id = next_[rank]++;
  Round& round = rounds_.try_emplace(id, size_).first->second;
  if (round.arrived == 0) round.operation = operation;
  if (round.operation != operation) {
    fail_locked(c10::str("collective mismatch: rank ", rank, " calls ", operation,
                         ", another rank calls ", round.operation));
    TORCH_CHECK(false, failure_);
  }
  round.here[rank] = true;
  round.tensors[rank] = std::move(tensors);
  ++round.arrived;
  changed_.notify_all();
  wait_until(
      lock, timeout, [&] { return round.arrived == size_; },
      [&] {
        return c10::str(operation, " on rank ", rank, ", waiting for rank ", missing_ranks(round));
      });
  std::vector<Tensors> all = round.tensors;
  if (++round.left == size_) rounds_.erase(id);
  return all;
}

void ThreadGroup::post(int source, int destination, int tag, at::Tensor tensor) {
  const std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(failure_.empty(), failure_);
  mail_[{source, destination, tag}].push_back(std::move(tensor));
  changed_.notify_all();
}

at::Tensor ThreadGroup::take(int source, int destination, int tag,
                             std::chrono::milliseconds timeout) {
  std::unique_lock<std::mutex> lock(mutex_);
  auto& box = mail_[{source, destination, tag}];
  wait_until(
      lock, timeout, [&] { return !box.empty(); },
      [&] { return c10::str("recv on rank ", destination, " from rank ", source, " tag ", tag); });
  at::Tensor tensor = std::move(box.front());
  box.pop_front();
  return tensor;
}

std::shared_ptr<ThreadGroup> ThreadGroup::subgroup(const std::vector<int>& ranks, int nth) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto& group = subgroups_[{ranks, nth}];
  if (!group) group = std::make_shared<ThreadGroup>(static_cast<int>(ranks.size()));
  return group;
}

ThreadBackends make_thread_backends(int size) {
  const auto group = std::make_shared<ThreadGroup>(size);
  ThreadBackends backends;
  for (int rank = 0; rank < size; ++rank) {
    backends.push_back(c10::make_intrusive<ThreadBackend>(rank, group));
  }
  return backends;
}

namespace {

// Who has ended, and how.
class Roll {
 public:
  explicit Roll(int size) : running_(size, true), count_(size) {}

  void leave(int rank, std::exception_ptr error) {
    const std::lock_guard<std::mutex> lock(mutex_);
    running_[rank] = false;
    if (!error_) error_ = std::move(error);
    if (--count_ == 0) all_left_.notify_all();
  }

  void abort_after(std::chrono::milliseconds limit) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (all_left_.wait_for(lock, limit, [&] { return count_ == 0; })) return;
    std::fprintf(stderr, "run_ranks: not done after %lld ms; still running: rank",
                 static_cast<long long>(limit.count()));
    for (size_t rank = 0; rank < running_.size(); ++rank) {
      if (running_[rank]) std::fprintf(stderr, " %zu", rank);
    }
    std::fprintf(stderr, "\n");
    std::abort();
  }

  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  std::mutex mutex_;
  std::condition_variable all_left_;
  std::vector<bool> running_;
  int count_;
  std::exception_ptr error_;  // the first
};

}  // namespace

void run_ranks(int size, const std::function<void(int, c10::intrusive_ptr<ThreadBackend>)>& fn,
               std::chrono::milliseconds limit) {
  const ThreadBackends backends = make_thread_backends(size);
  Roll roll(size);
  const auto run_rank = [&](int rank) {
    std::exception_ptr error;
    try {
      fn(rank, backends[rank]);
    } catch (...) {
      error = std::current_exception();
    }
    // Before the peers hear of it: their own exceptions are consequences.
    roll.leave(rank, error);
    if (error) backends[rank]->kill("it threw an exception");
    if (::testing::Test::HasFatalFailure()) backends[rank]->kill("it failed an assertion");
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) threads.emplace_back(run_rank, rank);
  roll.abort_after(limit);
  for (auto& thread : threads) thread.join();
  roll.rethrow();
}

}  // namespace powersgd::test
