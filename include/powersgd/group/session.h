// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "powersgd/compressor/compressor.h"
#include "powersgd/core/options.h"
#include "powersgd/group/stage_probe.h"
#include "powersgd/group/stats.h"

namespace powersgd {

class AllreduceTaker;
class Connection;
class Engine;
struct Job;
class Messages;
struct Replica;

enum class LogLevel { kInfo, kWarning };

// Called on the thread that calls a collective, never on a worker.
using LogSink = std::function<void(LogLevel, const std::string&)>;

// Connects an engine's backend on a store that nothing else uses, within `timeout` or else the
// timeout that the group was made with, which is the backend's own. Called on an engine's thread.
using Connect = std::function<c10::intrusive_ptr<c10d::Backend>(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
    std::optional<std::chrono::milliseconds> timeout)>;

// The backends that serve one device type. If `inner` blocks the host, `connect` makes another
// instance of the same backend when the group first compresses there: the engine exchanges payloads
// on it while `inner` serves the caller, because two threads that issue on one Gloo context corrupt
// each other's data. If `inner` is ordered by streams, it serves both and `connect` is null.
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
// Ownership: shared by the group's BackendPowerSGD and by each attached model, so either may end
// first. Owns the engines and their connections, shares the inner backends.
//
// Threads: reductions may be called from any one thread at a time, as on Gloo. Everything else is
// safe from any thread.
class Session {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  // Rank i is on host `hosts[i]`, hosts numbered in any way. Empty: on a host of its own.
  Session(int rank, int size, std::vector<InnerAndConnect> inners, powersgd::Options options,
          LogSink log, std::vector<int> hosts = {});
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
  const std::vector<int>& hosts() const { return hosts_; }

  // Reductions. Each of the first two returns at once.

  // Takes one step of docs/algorithm.md for one bucket, which counts in `stats`. If `more_follow`,
  // the caller promises to make another such call, or to call flush(), in the same backward pass.
  WorkPtr allreduce_compressed(const std::shared_ptr<BucketCompressor>& compressor,
                               const at::Tensor& gradient, const StepInfo& step,
                               const std::shared_ptr<Stats>& stats,
                               std::chrono::milliseconds timeout = c10d::kUnsetTimeout,
                               bool more_follow = false);
  // Begins what allreduce_compressed deferred because more calls were to follow.
  void flush();
  // In between, an inner backend that coalesces issues no collective, and a step would go on with
  // payloads that are not summed: it is an error instead.
  void begin_coalescing() { coalescing_ = true; }
  void end_coalescing() { coalescing_ = false; }
  bool is_coalescing() const { return coalescing_; }
  void check_not_coalescing() const;
  // Replaces `gradient` with its sum over ranks divided by `divisor`, on the inner backend.
  WorkPtr average_exact(at::Tensor gradient, int divisor, Stats& stats);
  // Counts a gradient that is sent whole. A single rank sends nothing.
  void count_exact(int64_t bytes, Stats& stats) const {
    if (size_ > 1) stats.add_exact(bytes);
  }
  // Replaces each tensor with its mean over ranks, on the engine, after all submitted steps.
  // Blocks.
  void average_after_steps(std::vector<at::Tensor>& tensors);
  // Runs `job`, which needs no other rank, on the engine of `device` after all submitted steps. The
  // second one blocks, and works after shutdown() and abort() as well.
  [[nodiscard]] WorkPtr start_after_steps(c10::Device device, std::function<void()> job);
  void run_after_steps(c10::Device device, const std::function<void()>& job);
  // For a job after all submitted steps that nobody waits for: the next collective on the engine of
  // `device` fails with its exception, or a shutdown logs it.
  void leave_unwatched(const WorkPtr& work, c10::Device device);
  // Compares state that must agree on all ranks, after all submitted steps, and replaces it with
  // rank 0's where it differs. The next step or snapshot() logs the differences, which count in
  // `stats`. Collective.
  void check_replicas(std::vector<Replica> replicas, c10::Device device,
                      const std::shared_ptr<Stats>& stats);

  // Replaces Q with rank `source`'s where it differs. Collective, after all submitted steps.
  // Blocks.
  void share_replicas(std::vector<Replica> replicas, c10::Device device, int source);

  // True if `scope(...)` of the calling thread, or else `scope`, admits an attached model's
  // bucket.
  bool admits_attached(const powersgd::Options& options) const;

  // Steps and counts.

  // Counts a step in `stats`, and logs the group's every compression_stats_logging_frequency steps.
  // While a CUDA graph is captured (`captured`), the device cannot be read, so the step logs none.
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

  // Notes that something was attached, and its first compressed step (empty: never). All ranks call
  // this between the same two collectives.
  void note_attached(std::optional<int64_t> starts_at);
  // True once something was attached. Stays true even when all of it is gone, because ranks do not
  // drop it at the same time.
  bool was_attached() const;
  // Asks `taker` about every all-reduce from now on, as long as it lives.
  void add_taker(const std::weak_ptr<AllreduceTaker>& taker);
  // The taker that expects an all-reduce of these tensors. Null if there is none.
  std::shared_ptr<AllreduceTaker> taker_of(const std::vector<at::Tensor>& tensors) const;
  // The first step with compressed gradients: the earliest of all that was attached, or the group's
  // if nothing was. Empty if nothing will be compressed.
  std::optional<int64_t> starts_at() const;
  // True if anything has been compressed since the start.
  bool compressing() const { return stats_->host_counts().compressed_calls > 0; }
  // A message that training has taken steps but compression has not started. Empty if that is not
  // so, was said before, or compression starts within `soon` steps.
  std::string not_started(int64_t soon = 0);
  // The same for one attached model, by its own counts and start. The caller must say it only once.
  std::string not_started(const Stats& stats, std::optional<int64_t> starts_at, int64_t soon);

  // Channels, and ends.

  // Connects the engine of a device ahead of its first step. All ranks must call it. Returns at
  // once; the first step reports any error.
  void connect(c10::Device device);
  // Sets the timeout of the engines, including those that are not connected yet.
  void set_timeout(std::chrono::milliseconds timeout);
  // Calls `action` on every connected engine's backend, even if it throws on one. Then rethrows the
  // first exception.
  void for_each_connected(const std::function<void(c10d::Backend&)>& action) const;
  // Both do all that they can, then rethrow the first exception. They may run concurrently: an
  // abort ends the wait of a shutdown.

  // Lets submitted steps end, up to a time limit. Compressed calls afterwards are errors.
  void shutdown();
  // Fails queued steps at once. A step in flight ends when the inner backend lets it.
  void abort();

 private:
  WorkPtr submit_collective(std::vector<at::Tensor> tensors, Job job, c10::Device device,
                            std::chrono::milliseconds timeout);
  // Waits for the submitted steps, and makes the current stream wait for those that are enqueued.
  void wait_for_steps(c10::Device device) const;
  void log_warnings();
  void log_unwatched();
  Engine& engine_of(c10::Device device) const;

  const int rank_;
  const int size_;
  const powersgd::Options options_;
  const LogSink log_;
  const std::vector<int> hosts_;
  const std::shared_ptr<const Levels> levels_;  // null: one
  const std::shared_ptr<Stats> stats_;
  const std::shared_ptr<Messages> warnings_;
  std::vector<InnerAndConnect> inners_;
  std::vector<std::shared_ptr<Connection>> connections_;
  std::map<c10::DeviceType, std::unique_ptr<Engine>> engines_;

  std::atomic<bool> coalescing_{false};
  std::mutex after_end_mutex_;  // held by a job that runs once its engine has ended

  mutable std::mutex mutex_;  // guards the members below
  std::vector<std::weak_ptr<AllreduceTaker>> takers_;
  bool was_attached_ = false;
  std::optional<int64_t> first_start_;  // of all that was attached and is compressed
  bool said_not_started_ = false;
  std::shared_ptr<const StageProbe> probe_;
  std::map<c10::DeviceType, std::vector<WorkPtr>> unwatched_;
};

}  // namespace powersgd
