// SPDX-License-Identifier: BSD-3-Clause
#include "ranks/thread_ranks.h"

#include <gtest/gtest.h>

#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <future>
#include <mutex>
#include <thread>
#include <utility>

namespace powersgd::test {
namespace {

// The ranks that still run, and the first exception of the others.
class RunningRanks {
 public:
  explicit RunningRanks(int size) : running_(size, true), count_(size) {}

  void end(int rank, std::exception_ptr error) {
    const std::lock_guard<std::mutex> lock(mutex_);
    running_[rank] = false;
    if (!error_) error_ = std::move(error);
    if (--count_ == 0) all_ended_.notify_all();
  }

  void abort_after(std::chrono::milliseconds limit) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (all_ended_.wait_for(lock, limit, [&] { return count_ == 0; })) return;
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
  std::condition_variable all_ended_;
  std::vector<bool> running_;
  int count_;
  std::exception_ptr error_;
};

}  // namespace

void run_ranks(int size, const std::function<void(int, c10::intrusive_ptr<ThreadBackend>)>& fn,
               std::chrono::milliseconds limit) {
  const ThreadBackends backends = make_thread_backends(size);
  RunningRanks ranks(size);
  const auto run_rank = [&](int rank) {
    std::exception_ptr error;
    try {
      fn(rank, backends[rank]);
    } catch (...) {
      error = std::current_exception();
    }
    // This exception counts as the first. Those of the peers follow from it.
    ranks.end(rank, error);
    if (error) backends[rank]->kill("it threw an exception");
    if (::testing::Test::HasFatalFailure()) backends[rank]->kill("it failed an assertion");
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) threads.emplace_back(run_rank, rank);
  ranks.abort_after(limit);
  for (auto& thread : threads) thread.join();
  ranks.rethrow();
}

void run_both(const std::function<void()>& one, const std::function<void()>& other) {
  std::promise<void> begun;
  run_ranks(2, [&](int thread, const auto&) {
    if (thread == 0) {
      begun.set_value();
      one();
    } else {
      begun.get_future().wait();
      other();
    }
  });
}

}  // namespace powersgd::test
