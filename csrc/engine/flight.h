// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/core/Event.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>

#include "engine/direct_channel.h"
#include "engine/engine.h"
#include "engine/profiler_context.h"
#include "engine/work.h"

namespace powersgd {

// A job on its way through a ThreadEngine.
//
// Threads: one at a time, except that abort() may run during wait().
class Flight {
 public:
  // Made on the thread that submits the job.
  Flight(c10::intrusive_ptr<WorkPowerSGD> work, Job job, c10::Device device,
         std::chrono::milliseconds timeout);

  // Gives the job the channel of its exchange. Called before run().
  void open(std::function<DirectChannel::BackendPtr(std::chrono::milliseconds)> connect, Mail mail);
  // Ends the collective that has arrived, if there is one, and runs the next part, if there is one.
  void run();
  // Waits for the collective in flight. run() rethrows its exception.
  void wait();
  // Ends wait().
  void abort() { channel_->abort(); }
  // Fails the job because its engine was aborted.
  void cancel();
  // Frees what the job holds and completes its Work.
  void complete();

  bool in_flight() const { return !failed() && channel_->in_flight(); }
  bool failed() const { return error_ != nullptr; }
  bool done() const { return failed() || (next_ == job_.parts.size() && !channel_->in_flight()); }
  size_t parts_begun() const { return next_; }
  DirectChannel& channel() { return *channel_; }
  const Job& job() const { return job_; }

  // The engine sets these, and its mutex guards them.
  uint64_t number = 0;     // 1, 2, ... in the order of submission
  uint64_t after = 0;      // the job that must have ended before this one begins
  uint64_t in_series = 0;  // 1, 2, ... among the jobs that have an exchange
  std::weak_ptr<const void> exchange;

 private:
  void attempt(const std::function<void()>& body);
  void run_part();
  void on_device(const std::function<void()>& body);

  c10::intrusive_ptr<WorkPowerSGD> work_;
  Job job_;
  const c10::Device device_;
  const std::chrono::milliseconds timeout_;
  std::shared_ptr<c10::Event> ready_;        // recorded on the caller's stream; null on the CPU
  std::optional<ProfilerContext> profiler_;  // of the thread that submitted the job
  std::optional<DirectChannel> channel_;
  size_t next_ = 0;          // the part that is to run next
  std::exception_ptr lost_;  // why the collective failed
  std::exception_ptr error_;
};

}  // namespace powersgd
