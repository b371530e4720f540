// SPDX-License-Identifier: BSD-3-Clause
//
// The reductions of a session, and its ends.
#include "powersgd/group/session.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "engine/connection.h"
#include "engine/stream_engine.h"
#include "engine/thread_engine.h"
#include "group/compressed_step.h"
#include "group/replicas.h"
#include "powersgd/engine/first_error.h"
#include "powersgd/engine/interpreter.h"
#include "powersgd/group/scope_override.h"

namespace powersgd {
namespace {

void check_served(bool served, c10::Device device) {
  TORCH_CHECK(served, "powersgd: this group has no inner backend for ", device, " tensors");
}

// A thread that waits on a store keeps other threads from using it, and another rank may be waiting
// for those. A clone has its own connection. A store that is written in Python may have no clone.
c10::intrusive_ptr<c10d::Store> clone_of(const c10::intrusive_ptr<c10d::Store>& store) {
  if (!store) return nullptr;
  try {
    return store->clone();
  } catch (const std::exception&) {
    return store;
  }
}

}  // namespace

Session::Session(int rank, int size, std::vector<InnerAndConnect> inners, powersgd::Options options,
                 LogSink log, std::vector<int> hosts)
    : rank_(rank),
      size_(size),
      options_(std::move(options)),
      log_(std::move(log)),
      hosts_(std::move(hosts)),
      levels_(levels_of(hosts_, rank)),
      stats_(std::make_shared<Stats>()),
      warnings_(std::make_shared<Messages>()),
      inners_(std::move(inners)) {
  validate(options_);
  for (const InnerAndConnect& of : inners_) {
    if (!of.connect) {
      engines_[of.device] = std::make_unique<StreamEngine>(rank, of.inner);
      continue;
    }
    auto connect = [of, rank, size](std::optional<std::chrono::milliseconds> timeout) {
      return of.connect(clone_of(of.store), rank, size, timeout);
    };
    connections_.push_back(std::make_shared<Connection>(std::move(connect)));
    engines_[of.device] = std::make_unique<ThreadEngine>(rank, connections_.back());
  }
}

Session::~Session() {
  run_unlocked([this] {
    engines_.clear();
    connections_.clear();
    inners_.clear();
  });
}

Engine& Session::engine_of(c10::Device device) const {
  const auto found = engines_.find(device.type());
  check_served(found != engines_.end(), device);
  return *found->second;
}

Ranks Session::ranks_on(c10::Device device) const {
  const bool has_streams = std::any_of(inners_.begin(), inners_.end(), [&](const auto& of) {
    return of.device == device.type() && !of.connect;
  });
  return {rank_, size_, /*backend_sums=*/has_streams, /*schedule=*/{}, levels_};
}

Session::WorkPtr Session::submit_collective(std::vector<at::Tensor> tensors, Job job,
                                            c10::Device device, std::chrono::milliseconds timeout) {
  check_not_coalescing();
  std::vector<WorkPtr> unwatched;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    unwatched = std::exchange(unwatched_[device.type()], {});
  }
  if (!unwatched.empty()) {
    // They ran alone, so they have ended when a later job begins.
    std::function<void(Channel&)>& first = job.parts.front();
    first = [unwatched = std::move(unwatched), body = std::move(first)](Channel& channel) {
      for (const WorkPtr& work : unwatched) {
        if (const std::exception_ptr error = work->exception()) std::rethrow_exception(error);
      }
      body(channel);
    };
  }
  return engine_of(device).submit(std::move(tensors), std::move(job), device, timeout);
}

void Session::leave_unwatched(const WorkPtr& work, c10::Device device) {
  const std::lock_guard<std::mutex> lock(mutex_);
  unwatched_[device.type()].push_back(work);
}

void Session::log_unwatched() {
  std::map<c10::DeviceType, std::vector<WorkPtr>> unwatched;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    unwatched.swap(unwatched_);
  }
  for (const auto& [device, works] : unwatched) {
    for (const WorkPtr& work : works) {
      if (!work->isCompleted() || !work->exception()) continue;
      try {
        std::rethrow_exception(work->exception());
      } catch (const std::exception& error) {
        log(LogLevel::kWarning, c10::str("after the last step: ", error.what()));
      }
    }
  }
}

Session::WorkPtr Session::allreduce_compressed(const std::shared_ptr<BucketCompressor>& compressor,
                                               const at::Tensor& gradient, const StepInfo& step,
                                               const std::shared_ptr<Stats>& stats,
                                               std::chrono::milliseconds timeout,
                                               bool more_follow) {
  std::shared_ptr<const StageProbe> probe;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    probe = probe_;
  }
  Job job = compressed_step(compressor, gradient, step, stats, std::move(probe));
  job.more_follow = more_follow;
  return submit_collective({gradient}, std::move(job), gradient.device(), timeout);
}

void Session::flush() {
  for (const auto& [device, engine] : engines_) engine->flush();
}

void Session::check_not_coalescing() const {
  TORCH_CHECK(!coalescing_,
              "powersgd: nothing is compressed between the start and the end of a coalescing block "
              "of the same group; move the block to before or after it, or to another group");
}

Session::WorkPtr Session::average_exact(at::Tensor gradient, int divisor, Stats& stats) {
  const auto found = std::find_if(inners_.begin(), inners_.end(), [&](const auto& inner) {
    return inner.device == gradient.device().type();
  });
  check_served(found != inners_.end(), gradient.device());
  // Divides first, by multiplication, as DDP does without a hook, so the bits are the same.
  gradient.mul_(1.0 / divisor);
  const int64_t numel = gradient.is_sparse() ? gradient._values().numel() : gradient.numel();
  count_exact(numel * static_cast<int64_t>(gradient.element_size()), stats);
  std::vector<at::Tensor> tensors = {std::move(gradient)};
  return found->inner->allreduce(tensors);
}

void Session::average_after_steps(std::vector<at::Tensor>& tensors) {
  if (tensors.empty() || size_ == 1) return;
  const at::Device device = tensors.front().device();
  auto job = [&tensors, size = size_](Channel& channel) {
    for (at::Tensor& tensor : tensors) {
      channel.allreduce(tensor);
      tensor.mul_(1.0 / size);
    }
  };
  submit_collective(tensors, job_alone(std::move(job)), device, c10d::kUnsetTimeout)->wait();
}

Session::WorkPtr Session::start_after_steps(c10::Device device, std::function<void()> job) {
  return engine_of(device).submit({}, job_alone([job = std::move(job)](Channel&) { job(); }),
                                  device, c10d::kUnsetTimeout);
}

// Once the engine has ended, this thread runs the job, as soon as nothing else can touch a state.
void Session::run_after_steps(c10::Device device, const std::function<void()>& job) {
  bool begun = false;
  try {
    start_after_steps(device, [&] {
      begun = true;
      job();
    })->wait();
  } catch (const c10::DistBackendError&) {
    if (begun) throw;
    engine_of(device).wait_for_end(device);
    const std::lock_guard<std::mutex> in_turn(after_end_mutex_);
    const at::NoGradGuard no_grad;
    job();
  }
}

void Session::check_replicas(std::vector<Replica> replicas, c10::Device device,
                             const std::shared_ptr<Stats>& stats) {
  auto job = [replicas = std::move(replicas), rank = rank_, size = size_, stats,
              warnings = warnings_](Channel& channel) {
    std::vector<std::string> found = restore_agreement(channel, rank, size, replicas);
    stats->add_differences(static_cast<int64_t>(found.size()));
    warnings->add(std::move(found));
  };
  leave_unwatched(submit_collective({}, job_alone(std::move(job)), device, c10d::kUnsetTimeout),
                  device);
}

void Session::share_replicas(std::vector<Replica> replicas, c10::Device device, int source) {
  auto job = [replicas = std::move(replicas), rank = rank_, size = size_, source](
                 Channel& channel) { restore_agreement(channel, rank, size, replicas, source); };
  submit_collective({}, job_alone(std::move(job)), device, c10d::kUnsetTimeout)->wait();
}

bool Session::admits_attached(const powersgd::Options& options) const {
  if (size_ == 1) return false;
  if (const auto override = current_override()) return override->enabled;
  return options.scope != Scope::kNever;
}

void Session::set_stage_probe(StageProbe probe) {
  const std::lock_guard<std::mutex> lock(mutex_);
  probe_ = std::make_shared<const StageProbe>(std::move(probe));
}

void Session::connect(c10::Device device) { engine_of(device).connect(device); }

void Session::set_timeout(std::chrono::milliseconds timeout) {
  FirstError error;
  for (const auto& of : connections_) error.run([&] { of->set_timeout(timeout); });
  error.rethrow();
}

void Session::for_each_connected(const std::function<void(c10d::Backend&)>& action) const {
  FirstError error;
  for (const auto& of : connections_) error.run([&] { of->if_connected(action); });
  error.rethrow();
}

void Session::shutdown() {
  FirstError error;
  if (rank_ == 0) {
    error.run([&] {
      if (const std::string message = not_started(); !message.empty()) {
        log(LogLevel::kWarning, message);
      }
    });
  }
  for (const auto& of : engines_) error.run([&] { of.second->shutdown(); });
  error.run([&] { log_unwatched(); });
  error.run([&] { for_each_connected([](c10d::Backend& backend) { backend.shutdown(); }); });
  error.rethrow();
}

void Session::abort() {
  FirstError error;
  // The backends first: this ends what is in flight, if the inner backend can.
  error.run([&] { for_each_connected([](c10d::Backend& backend) { backend.abort(); }); });
  for (const auto& of : engines_) error.run([&] { of.second->abort(); });
  error.rethrow();
}

}  // namespace powersgd
