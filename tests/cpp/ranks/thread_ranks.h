// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <chrono>
#include <functional>
#include <vector>

#include "ranks/ready_channels.h"
#include "ranks/thread_backend.h"

namespace powersgd::test {

// Two more groups of the same ranks: the channels of each rank's session.
class Channels {
 public:
  explicit Channels(int size) : p_(make_thread_backends(size)), q_(make_thread_backends(size)) {}

  auto of(int rank) const {
    return ready_channels(p_[static_cast<size_t>(rank)], q_[static_cast<size_t>(rank)]);
  }
  ThreadBackend& p(int rank) const { return *p_[static_cast<size_t>(rank)]; }
  ThreadBackend& q(int rank) const { return *q_[static_cast<size_t>(rank)]; }
  // Ends the waiting of the peers of a rank that threw.
  void kill(int rank) const {
    p(rank).kill("a rank threw");
    q(rank).kill("a rank threw");
  }

 private:
  const ThreadBackends p_, q_;
};

// Runs fn(rank, backend) on a thread per rank, waits for all, and rethrows the first exception. A
// rank that throws or stops at a failed ASSERT is killed, so that its peers do not wait for it. If
// ranks still run after `limit`, the process aborts and names them.
void run_ranks(int size, const std::function<void(int, c10::intrusive_ptr<ThreadBackend>)>& fn,
               std::chrono::milliseconds limit = std::chrono::seconds(60));

// Runs both functions, each on a thread of its own. The second begins once the first has. Rethrows
// the first exception when both have returned. If they do not return, the process aborts.
void run_both(const std::function<void()>& one, const std::function<void()>& other);

}  // namespace powersgd::test
