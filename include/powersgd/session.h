// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <array>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "powersgd/compressor.h"
#include "powersgd/options.h"
#include "powersgd/stage_probe.h"
#include "powersgd/stats.h"

namespace powersgd {

class AllreduceTaker;
class Connection;
class Engine;
class Messages;
struct Replica;

enum class LogLevel { kInfo, kWarning };

// Called on the thread that calls a collective, never on a worker.
using LogSink = std::function<void(LogLevel, const std::string&)>;

// Connects the backend of an engine on a store that nothing else uses, within `timeout` or the one
// that the group was made with, which is the backend's own. Called on an engine's thread.
using Connect = std::function<c10::intrusive_ptr<c10d::Backend>(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
    std::optional<std::chrono::milliseconds> timeout)>;

// The backends that serve one device type. If `inner` blocks the host, `connect` makes another
// instance of the same backend when the group first compresses there: the engine exchanges payloads
// on it while `inner` serves the caller, because two threads that issue on one Gloo context corrupt
// each other's data. If `inner` is ordered by streams, it serves all and `connect` is null.
struct InnerAndConnect {
  c10::DeviceType device;
  c10::intrusive_ptr<c10d::Backend> inner;
  Connect connect;
  c10::intrusive_ptr<c10d::Store> store;  // for connect
};

// Purpose: reduces the gradients of one process group, and knows what its steps have in common: an
// engine for each device type, the counts and the log.
//
// Contract: every rank makes its session with equal options and calls the reductions in the same
// order.
//
// Ownership: shared by the group's BackendPowerSGD and by each attached model, so that either may
// end first. Owns the engines and their connections, shares the inner backends.
//
// Threads: reductions may be called from any one thread at a time, as on Gloo. Everything else is
// safe from any thread.
class Session {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  Session(int rank, int size, std::vector<InnerAndConnect> inners, powersgd::Options options,
          LogSink log);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  // The ranks that sum payloads of a device.
  Ranks ranks_on(c10::Device device) const;
  const powersgd::Options& options() const { return options_; }
  const LogSink& log_sink() const { return log_; }
  const std::vector<InnerAndConnect>& inners() const { return inners_; }

  // Reductions. Each of the first two returns at once.

  // Takes one step of docs/algorithm.md for one bucket, which counts in `stats`. If `more_follow`,
  // the caller promises to make another such call, or to call flush(), in the same backward pass.
  WorkPtr allreduce_compressed(const std::shared_ptr<BucketCompressor>& compressor,
                               const at::Tensor& gradient, const StepInfo& step,
                               const std::shared_ptr<Stats>& stats,
                               std::chrono::milliseconds timeout = c10d::kUnsetTimeout,
                               bool more_follow = false);
  // Begins what allreduce_compressed has put off because more calls were to follow.
  void flush();
  // Makes `gradient` the sum over ranks divided by `divisor`, by the inner backend.
  WorkPtr average_exact(at::Tensor gradient, int divisor, Stats& stats);
  // Counts a gradient that is sent whole. A rank alone sends nothing.
  void count_exact(int64_t bytes, Stats& stats) const {
    if (size_ > 1) stats.add_exact(bytes);
  }
  // Makes each tensor its mean over ranks, by the engine, after all submitted steps. Blocks.
  void average_after_steps(std::vector<at::Tensor>& tensors);
  // Runs `job` on the engine of `device` after all submitted steps. The second one blocks.
  WorkPtr start_after_steps(c10::Device device, std::function<void()> job);
  void run_after_steps(c10::Device device, const std::function<void()>& job);
  // Compares state that must agree on all ranks, after all submitted steps, and gives every rank
  // that of rank 0 where it differs. The next step or snapshot() logs the differences, which count
  // in `stats`. Collective.
  void check_replicas(std::vector<Replica> replicas, c10::Device device,
                      const std::shared_ptr<Stats>& stats);

  // Gives every rank rank `source`'s Q where they differ. Collective, after all submitted steps.
  // Blocks.
  void share_replicas(std::vector<Replica> replicas, c10::Device device, int source);

  // True if `scope(...)` of the calling thread, or else `scope`, admits an attached model's
  // bucket.
  bool admits_attached(const powersgd::Options& options) const;

  // Steps and counts.

  // Counts a step in `stats`, and logs the group's every compression_stats_logging_frequency steps.
  // A CUDA graph that is being captured (`captured`) admits no reading from the device: such a step
  // logs none.
  void end_step(Stats& stats, const powersgd::Options& options, bool captured = false);
  // The counts of the whole group. A model has its own, which add to these.
  const std::shared_ptr<Stats>& stats() const { return stats_; }
  // Counts since the start or since reset_stats(). Both wait for submitted steps.
  StatsSnapshot snapshot() { return snapshot(*stats_); }
  StatsSnapshot snapshot(Stats& stats);
  void reset_stats(Stats& stats);
  void log(LogLevel level, const std::string& message) const;
  void set_stage_probe(StageProbe probe);

  // Attachments, and when compression starts.

  // Notes that something was attached, which all ranks do between the same two collectives, and
  // from which of its steps on it is compressed. Empty: never.
  void note_attached(std::optional<int64_t> starts_at);
  // True once something was attached. It stays true when that is gone: ranks do not drop theirs at
  // the same time.
  bool was_attached() const;
  // Asks `taker` about every all-reduce from now on, as long as it lives.
  void add_taker(const std::weak_ptr<AllreduceTaker>& taker);
  // The taker that expects an all-reduce of these tensors. Null if there is none.
  std::shared_ptr<AllreduceTaker> taker_of(const std::vector<at::Tensor>& tensors) const;
  // The step from which gradients are compressed: the first of what is attached, or the group's if
  // nothing ever was. Empty if nothing will be compressed.
  std::optional<int64_t> starts_at() const;
  // True if anything has been compressed since the start.
  bool compressing() const { return stats_->host_counts().compressed_calls > 0; }
  // Says that steps were trained before the one from which gradients are compressed. Empty if that
  // is not so, was said before, or compression starts within `soon` steps.
  std::string not_started(int64_t soon = 0);
  // The same of one of the attached, by its own counts and start. The caller says it only once.
  std::string not_started(const Stats& stats, std::optional<int64_t> starts_at, int64_t soon);

  // Channels, and ends.

  // Connects the engine of a device ahead of its first step. All ranks call it alike. Returns at
  // once: an error is that of the first step.
  void connect(c10::Device device);
  // Sets the time-out of the engines, also of those that are not connected yet.
  void set_timeout(std::chrono::milliseconds timeout);
  // Calls it on every engine's backend that is connected, even if it throws on one. Then rethrows
  // the first exception.
  void for_each_connected(const std::function<void(c10d::Backend&)>& action) const;
  // Both do all that they can, then rethrow the first exception. One thread may call them while
  // another is in them: an abort ends the wait of a shutdown.

  // Lets submitted steps end, within a bound. Afterwards a compressed call is an error.
  void shutdown();
  // Fails queued steps at once. One in flight ends as the inner backend lets it.
  void abort();

 private:
  // Waits for the submitted steps, and makes the current stream wait for those that are enqueued.
  void wait_for_steps(c10::Device device) const;
  void log_warnings();
  Engine& engine_of(c10::Device device) const;

  const int rank_;
  const int size_;
  const powersgd::Options options_;
  const LogSink log_;
  const std::shared_ptr<Stats> stats_;
  const std::shared_ptr<Messages> warnings_;
  std::vector<InnerAndConnect> inners_;
  std::vector<std::shared_ptr<Connection>> connections_;
  std::map<c10::DeviceType, std::unique_ptr<Engine>> engines_;

  mutable std::mutex mutex_;  // guards the members below
  std::vector<std::weak_ptr<AllreduceTaker>> takers_;
  bool was_attached_ = false;
  std::optional<int64_t> first_start_;  // of all that was attached and is compressed
  bool said_not_started_ = false;
  std::shared_ptr<const StageProbe> probe_;
};

}  // namespace powersgd
