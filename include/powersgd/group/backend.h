// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <utility>
#include <vector>

#include "powersgd/core/options.h"
#include "powersgd/group/forwarding_backend.h"
#include "powersgd/group/session.h"

namespace powersgd {

class FlatTensors;

// The options that torch reads from a backend when it splits a group off (split_group).
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

// Purpose: a process-group backend that compresses gradients with PowerSGD (Vogels, Karimireddy,
// Jaggi, NeurIPS 2019; docs/algorithm.md) on their way to the backend that it wraps.
//
// Contract: an allreduce that Options::scope admits sends low-rank factors and returns the sum (or
// average) of what the ranks sent. Every other call is forwarded unchanged, bit for bit. All ranks
// make it with equal options and call collectives in the same order, as with any backend.
//
// Ownership: shares the inner backends with its session, and the session with the attached models.
//
// Threads: collectives may be called from any one thread at a time, as on Gloo. The Work objects
// are safe from any thread.
class BackendPowerSGD : public ForwardingBackend {
 public:
  // `hosts` as in Session.
  BackendPowerSGD(int rank, int size, std::vector<InnerAndConnect> inners,
                  powersgd::Options options, LogSink log = {}, std::vector<int> hosts = {});
  ~BackendPowerSGD() override;

  const std::shared_ptr<Session>& session() const { return session_; }

  const std::string getBackendName() const override { return "powersgd"; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override;

  c10::intrusive_ptr<c10d::Work> allreduce(
      std::vector<at::Tensor>& tensors,
      const c10d::AllreduceOptions& opts = c10d::AllreduceOptions()) override;
  // In between, every allreduce is forwarded, and what attached models compress is an error.
  void startCoalescing() override;
  c10::intrusive_ptr<c10d::Work> endCoalescing() override;

  // The children compress with the options in `opts` if it is a BackendOptions, else with this
  // group's. Null on a rank that is not a member.
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

  // Lets submitted steps end, up to a time limit. Compressed calls afterwards are errors.
  void shutdown() override;
  // Fails queued steps at once. A step in flight ends when the inner backend lets it.
  void abort() override;
  // True after shutdown() or abort().
  bool ended() const { return ended_; }

 private:
  std::atomic<bool> ended_{false};
  std::shared_ptr<Session> session_;
  std::unique_ptr<FlatTensors> flat_tensors_;
};

}  // namespace powersgd
