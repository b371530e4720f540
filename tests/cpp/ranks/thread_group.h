// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace powersgd::test {

// Exchanges tensors between the ranks of one group, which are threads of this process. Safe from
// any thread.
class ThreadGroup {
 public:
  using Tensors = std::vector<at::Tensor>;

  explicit ThreadGroup(int size);
  int size() const { return size_; }

  // Hands in `tensors`, waits for every rank to do so, and returns all of them in rank order. The
  // n-th calls of the ranks belong together and must describe the same operation. Throws on a
  // difference, a time-out or a failed group. The first two fail the group.
  std::vector<Tensors> exchange(int rank, const std::string& operation, Tensors tensors,
                                std::chrono::milliseconds timeout);

  // Messages, of which those between two ranks with one tag arrive in their order.
  struct Address {
    int from, to, tag;
    bool operator<(const Address& other) const {
      return std::tie(from, to, tag) < std::tie(other.from, other.to, other.tag);
    }
  };
  void send(const Address& address, at::Tensor message);
  // Waits for a message. Returns an undefined tensor once `aborted`.
  at::Tensor receive(const Address& address, std::chrono::milliseconds timeout,
                     const std::atomic<bool>& aborted);
  void wake();  // who waits for a message

  // Keeps the messages that are sent from now on until deliver().
  void hold_messages();
  // Waits until so many are held. Throws if they are not in time.
  void expect_held(size_t count, std::chrono::milliseconds timeout);
  // Does so and delivers them.
  void deliver(size_t count, std::chrono::milliseconds timeout);

  // Makes every waiting call, now and later, throw `why`, or the reason of an earlier failure.
  void fail(const std::string& why);

 private:
  struct Round {
    explicit Round(int size) : has_arrived(size), tensors(size) {}
    std::string operation;
    std::vector<bool> has_arrived;  // by rank
    std::vector<Tensors> tensors;   // by rank
    int arrived = 0;
    int left = 0;
  };
  // Waits until `done` holds. On a time-out, fails the group with `what` and throws.
  void wait_until(std::unique_lock<std::mutex>& lock, std::chrono::milliseconds timeout,
                  const std::function<bool()>& done, const std::function<std::string()>& what);
  void expect_held_locked(std::unique_lock<std::mutex>& lock, size_t count,
                          std::chrono::milliseconds timeout);
  void fail_locked(const std::string& why);
  std::string missing_ranks(const Round& round) const;

  const int size_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::string failure_;
  std::vector<int64_t> next_;  // the round that each rank enters next
  std::map<int64_t, Round> rounds_;
  bool holds_ = false;
  std::vector<std::pair<Address, at::Tensor>> held_;
  std::map<Address, std::deque<at::Tensor>> arrived_;
};

}  // namespace powersgd::test
