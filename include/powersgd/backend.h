// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "powersgd/compressor.h"
#include "powersgd/forwarding_backend.h"
#include "powersgd/options.h"
#include "powersgd/stats.h"

namespace powersgd {

class AttachedModel;
class Engine;
class FlatTensors;
class Messages;
struct Replica;

enum class LogLevel { kInfo, kWarning };

// Called on the thread that calls a collective, never on a worker.
using LogSink = std::function<void(LogLevel, const std::string&)>;

// Called on an engine's thread before each stage with its name; what it throws fails the step.
using StageProbe = std::function<void(const char* stage)>;

// The backends that serve one device type. If `inner` blocks the host, the `channels` are two more
// instances of the same backend: the P and the Q payloads are summed on them from the engine's
// threads while `inner` serves the caller's, because two threads that issue on one Gloo context
// corrupt each other's data. If `inner` is ordered by streams there are none: it serves all.
struct InnerAndChannels {
  c10::DeviceType device;
  c10::intrusive_ptr<c10d::Backend> inner;
  std::vector<c10::intrusive_ptr<c10d::Backend>> channels;
};

// What torch asks a backend for when it makes a group from it (split_group).
struct BackendOptions : c10d::Backend::Options {
  BackendOptions(powersgd::Options compression, std::chrono::milliseconds timeout)
      : c10d::Backend::Options("powersgd", timeout), compression(std::move(compression)) {}

#ifdef POWERSGD_OPTIONS_HAVE_CLONE
  c10::intrusive_ptr<c10d::Backend::Options> clone() const override {
    return c10::make_intrusive<BackendOptions>(*this);
  }
#endif

  powersgd::Options compression;
};

// Throws if it is not finite and > 0.
void check_grad_scale(double scale);

// A process-group backend that compresses gradients with PowerSGD (Vogels, Karimireddy, Jaggi,
// NeurIPS 2019; docs/algorithm.md) on its way to the backend that it wraps.
//
// An allreduce that Options::scope admits sends low-rank factors and returns the sum (or average)
// of what the ranks sent; every other call is forwarded unchanged, bit for bit. All ranks must
// create it with equal options and call collectives in the same order, as with any backend.
//
// Owns its inner backends and one engine per device type. The attached models own this backend and
// it knows them weakly. Collectives may be called from any one thread at a time, as with Gloo;
// stats(), set_grad_scale() and the Work objects are safe from any thread.
class BackendPowerSGD : public ForwardingBackend {
 public:
  BackendPowerSGD(int rank, int size, std::vector<InnerAndChannels> inners,
                  powersgd::Options options, LogSink log = {});
  ~BackendPowerSGD() override;

  const std::string getBackendName() const override { return "powersgd"; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override;

  c10::intrusive_ptr<c10d::Work> allreduce(
      std::vector<at::Tensor>& tensors,
      const c10d::AllreduceOptions& opts = c10d::AllreduceOptions()) override;
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(
      std::vector<at::Tensor>& tensors,
      const c10d::AllreduceCoalescedOptions& opts = c10d::AllreduceCoalescedOptions()) override;

  // One step of section 1 of the design for one bucket. Returns at once.
  c10::intrusive_ptr<c10d::Work> allreduce_compressed(
      const std::shared_ptr<BucketCompressor>& compressor, const at::Tensor& gradient,
      const StepInfo& step, std::chrono::milliseconds timeout = c10d::kUnsetTimeout);

  // The sum over ranks divided by `divisor`, by the inner backend, uncompressed.
  c10::intrusive_ptr<c10d::Work> allreduce_average_exact(at::Tensor gradient, int divisor);

  // The mean over ranks of each tensor, by the channel, after all steps submitted so far. Blocks.
  void average_over_channel(std::vector<at::Tensor>& tensors);

  // Runs `job` on the engine of `device` after all steps submitted so far. Blocks.
  void run_after_steps(c10::Device device, const std::function<void()>& job);

  // The children compress with the options that `opts` carries, if it is a BackendOptions, else
  // with this group's. Null on a rank that is no member.
  c10::intrusive_ptr<c10d::Backend> split(
      const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
      const c10::intrusive_ptr<c10d::Backend::Options>& opts) override;
  void setTimeout(std::chrono::milliseconds timeout) override;
#ifdef POWERSGD_BACKEND_HAS_LIFECYCLE
  void addEphemeralTimeout(const std::chrono::milliseconds& timeout) override;
#endif
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  // Never: new ranks would not have the factors that all ranks must agree on.
  bool supportsReconfigure() const override { return false; }
  c10d::ReconfigureHandle get_reconfigure_handle() const override;
  c10::intrusive_ptr<c10d::Work> reconfigure(const c10d::ReconfigureOptions& opts) override;
#endif

  // Lets submitted steps end, within a bound; afterwards a compressed call is an error.
  void shutdown() override;
  // Fails queued steps at once. One in flight ends as the inner backend lets it.
  void abort() override;

  // The loss scale of the gradients to come, > 0. Residuals are rescaled when the next step reads
  // them. Holds for this group's flat tensors and attached models.
  void set_grad_scale(double scale);
  double grad_scale() const;

  // Whether a thread-local override or else `scope` admits a bucket of an attached model.
  bool admits_attached(const powersgd::Options& options) const;

  void add_model(const std::shared_ptr<AttachedModel>& model);
  std::vector<std::shared_ptr<AttachedModel>> models() const;

  const powersgd::Options& options() const { return options_; }
  Stats& stats() { return *stats_; }
  // Counts a step, and logs the statistics when it is time to.
  void end_step(const powersgd::Options& options);
  // Compares state that must agree on all ranks, after all steps submitted so far, and restores it
  // where it does not; what was found is logged by the next step or snapshot(). Collective.
  void check_replicas(std::vector<Replica> replicas, c10::Device device);
  // Counts since it was made or since reset_stats(). Both wait for the steps submitted so far.
  StatsSnapshot snapshot();
  void reset_stats();

  // The step from which gradients are compressed: the first of the attached models' that compress
  // any, or where no model was ever attached, the group's. Empty: nothing will be compressed.
  std::optional<int64_t> starts_at() const;
  // True if the next step of an attached model is compressed, or if none is attached and a flat
  // gradient has been.
  bool compressing() const;
  // Says that steps were trained before the one from which gradients are compressed. Empty if that
  // is not so, was said before, or compression starts within `soon` steps.
  std::string not_started(int64_t soon = 0);
  // For one owner of buckets; counted in snapshot() for as long as this backend lives.
  std::shared_ptr<StepCounter> make_step_counter();
  void log(LogLevel level, const std::string& message) const;
  void set_stage_probe(StageProbe probe);

 private:
  StatsSnapshot total();
  void log_warnings();
  void for_each_channel(const std::function<void(c10d::Backend&)>& action) const;
  Engine& engine_of(c10::Device device) const;

  const powersgd::Options options_;
  std::vector<InnerAndChannels> inners_;
  const LogSink log_;
  const std::shared_ptr<Stats> stats_;
  const std::shared_ptr<Messages> warnings_;
  std::map<c10::DeviceType, std::unique_ptr<Engine>> engines_;

  mutable std::mutex mutex_;  // guards what follows up to flat_tensors_
  std::vector<std::shared_ptr<StepCounter>> step_counters_;
  double grad_scale_ = 1;
  std::vector<std::weak_ptr<AttachedModel>> models_;
  bool had_model_ = false;
  std::optional<int64_t> first_start_;  // of all attached models that compress any parameter
  bool said_not_started_ = false;
  StatsSnapshot stats_base_;  // what reset_stats() found
  std::shared_ptr<const StageProbe> probe_;

  std::unique_ptr<FlatTensors> flat_tensors_;
};

}  // namespace powersgd
