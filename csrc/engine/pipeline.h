// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/connection.h"
#include "engine/flight.h"
#include "engine/mailboxes.h"

namespace powersgd {

// The jobs of a ThreadEngine and the threads that they run on, which may outlive the engine.
class Pipeline : public std::enable_shared_from_this<Pipeline> {
 public:
  explicit Pipeline(std::shared_ptr<Connection> connection) : connection_(std::move(connection)) {}

  const std::shared_ptr<Connection>& connection() const { return connection_; }

  void submit(const std::shared_ptr<Flight>& flight);
  // Refuses new jobs. Jobs in flight have `grace`, or what is left of an earlier one, to end.
  void close(std::chrono::milliseconds grace);
  // Fails the jobs that no thread holds, and ends the waits of those in flight.
  void abort();
  // Joins the threads when they have ended, or leaves them behind once the grace is over. Several
  // callers may wait; the first to return takes the threads.
  void end_threads();
  // Waits until all threads have ended, even those that were left behind.
  void wait_for_end();

 private:
  using FlightPtr = std::shared_ptr<Flight>;
  using Queue = std::deque<FlightPtr>;

  void start(std::function<void()> body);
  void drop_ended_jobs();

  // The worker, which runs the jobs.
  void work();
  void open(Flight& flight);
  FlightPtr take(std::unique_lock<std::mutex>& lock);
  Queue* next_queue();
  void put_in_flight(FlightPtr flight);
  void end_in_order(std::unique_lock<std::mutex>& lock);

  // The threads that wait, one for each part that begins a collective.
  void wait_for_messages(size_t part);

  void cancel(const FlightPtr& flight);

  const std::shared_ptr<Connection> connection_;
  Mailboxes mailboxes_;  // the worker's

  std::mutex mutex_;                    // guards the members below
  std::condition_variable changed_;     // notified when one of them changes
  std::map<size_t, Queue> ready_;       // by the part that is to run next
  std::map<size_t, Queue> in_flight_;   // by the part that began the collective
  std::map<uint64_t, FlightPtr> done_;  // by number, until earlier ones have ended
  std::vector<FlightPtr> lost_;         // their messages may still arrive, in memory that they keep
  uint64_t submitted_ = 0, exchanges_ = 0, last_alone_ = 0;
  uint64_t ended_ = 0;                                  // jobs end in the order of submission
  std::unordered_map<const void*, uint64_t> last_job_;  // the last job that changes an object
  bool closed_ = false;                                 // no more jobs
  bool aborted_ = false;                                // jobs that have not ended are failed
  bool worker_runs_ = false;
  int num_threads_ = 0;  // of the thread that submitted last
  // How long end_threads() waits. An abort makes it sooner.
  std::chrono::steady_clock::time_point grace_ends_ = std::chrono::steady_clock::time_point::max();
  std::vector<std::thread> threads_;
  int running_ = 0;  // threads, and calls of abort()
};

}  // namespace powersgd
