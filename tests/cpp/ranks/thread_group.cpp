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

void ThreadGroup::send(const Address& address, at::Tensor message) {
  const std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(failure_.empty(), failure_);
  if (holds_) {
    held_.emplace_back(address, std::move(message));
  } else {
    arrived_[address].push_back(std::move(message));
  }
  changed_.notify_all();
}

at::Tensor ThreadGroup::receive(const Address& address, std::chrono::milliseconds timeout,
                                const std::atomic<bool>& aborted) {
  std::unique_lock<std::mutex> lock(mutex_);
  std::deque<at::Tensor>& queue = arrived_[address];
  wait_until(
      lock, timeout, [&] { return aborted || !queue.empty(); },
      [&] { return c10::str("recv on rank ", address.to, " from rank ", address.from); });
  if (queue.empty()) return {};
  at::Tensor message = std::move(queue.front());
  queue.pop_front();
  return message;
}

void ThreadGroup::wake() {
  const std::lock_guard<std::mutex> lock(mutex_);
  changed_.notify_all();
}

void ThreadGroup::hold_messages() {
  const std::lock_guard<std::mutex> lock(mutex_);
  holds_ = true;
}

void ThreadGroup::expect_held_locked(std::unique_lock<std::mutex>& lock, size_t count,
                                     std::chrono::milliseconds timeout) {
  const bool held =
      changed_.wait_for(lock, timeout, [&] { return held_.size() >= count || !failure_.empty(); });
  TORCH_CHECK(held && failure_.empty(), held_.size(), " messages are on their way, expected ",
              count, " ", failure_);
}

void ThreadGroup::expect_held(size_t count, std::chrono::milliseconds timeout) {
  std::unique_lock<std::mutex> lock(mutex_);
  expect_held_locked(lock, count, timeout);
}

void ThreadGroup::deliver(size_t count, std::chrono::milliseconds timeout) {
  std::unique_lock<std::mutex> lock(mutex_);
  expect_held_locked(lock, count, timeout);
  for (auto& [address, message] : held_) arrived_[address].push_back(std::move(message));
  held_.clear();
  changed_.notify_all();
}

}  // namespace powersgd::test
