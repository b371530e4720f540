// SPDX-License-Identifier: BSD-3-Clause
#include "ranks/thread_group.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <utility>

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
    if (!round.has_arrived[rank]) ranks += c10::str(ranks.empty() ? "" : ", ", rank);
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
  round.has_arrived[rank] = true;
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

}  // namespace powersgd::test
