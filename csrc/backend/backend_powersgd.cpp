// SPDX-License-Identifier: BSD-3-Clause
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <cmath>
#include <utility>

#include "engine/stream_engine.h"
#include "engine/thread_engine.h"
#include "engine/work.h"
#include "gradients/compressed_step.h"
#include "gradients/flat_tensors.h"
#include "gradients/replicas.h"
#include "powersgd/attached_model.h"
#include "powersgd/backend.h"
#include "powersgd/interpreter.h"
#include "powersgd/scope_override.h"
#include "powersgd/stats.h"

namespace powersgd {
namespace {

std::vector<std::pair<c10::DeviceType, c10::intrusive_ptr<c10d::Backend>>> pass_through(
    const std::vector<InnerAndChannels>& inners) {
  std::vector<std::pair<c10::DeviceType, c10::intrusive_ptr<c10d::Backend>>> result;
  for (const InnerAndChannels& of : inners) result.emplace_back(of.device, of.inner);
  return result;
}

}  // namespace

void check_grad_scale(double scale) {
  TORCH_CHECK_VALUE(scale > 0 && std::isfinite(scale),
                    "grad_scale must be a finite number > 0, got ", scale);
}

BackendPowerSGD::BackendPowerSGD(int rank, int size, std::vector<InnerAndChannels> inners,
                                 powersgd::Options options, LogSink log)
    : ForwardingBackend(rank, size, pass_through(inners)),
      options_(std::move(options)),
      inners_(std::move(inners)),
      log_(std::move(log)),
      stats_(std::make_shared<Stats>()),
      warnings_(std::make_shared<Messages>()),
      flat_tensors_(std::make_unique<FlatTensors>(options_, make_step_counter())) {
  validate(options_);
  for (const InnerAndChannels& of : inners_) {
    TORCH_CHECK(of.channels.empty() || of.channels.size() == 2,
                "powersgd: two channels or none, got ", of.channels.size());
    if (of.channels.empty()) {
      engines_[of.device] = std::make_unique<StreamEngine>(rank, of.inner);
    } else {
      engines_[of.device] =
          std::make_unique<ThreadEngine>(rank, std::array{of.channels[0], of.channels[1]});
    }
  }
}

BackendPowerSGD::~BackendPowerSGD() {
  run_unlocked([this] {
    engines_.clear();
    inners_.clear();
    drop_inners();
  });
}

c10::intrusive_ptr<c10d::Work> BackendPowerSGD::allreduce(std::vector<at::Tensor>& tensors,
                                                          const c10d::AllreduceOptions& opts) {
  if (getSize() == 1) return ForwardingBackend::allreduce(tensors, opts);
  auto admitted = flat_tensors_->admit(tensors, opts);
  if (!admitted) {
    if (flat_tensors_->looks_joined(tensors, opts)) {
      log(LogLevel::kWarning,
          c10::str("a tensor of ", tensors.front().numel(),
                   " elements, as many as a flat gradient that is reduced in backward, is summed "
                   "outside of it, exactly. If this rank has run out of inputs in DDP's join(), "
                   "ranks that compress wait for it in vain: call torch_powersgd.attach(ddp), or "
                   "train inside torch_powersgd.compression(False)"));
    }
    return ForwardingBackend::allreduce(tensors, opts);
  }

  const at::Tensor& gradient = tensors.front();
  if (admitted->new_pass) end_step(options_);
  if (!admitted->to_check.empty()) {
    check_replicas(std::move(admitted->to_check), gradient.device());
  }
  if (admitted->dropped > 0) {
    log(LogLevel::kInfo, c10::str("dropped the state of ", admitted->dropped,
                                  " flat tensors that had not been reduced for a while"));
  }
  if (!admitted->compressor) {
    stats_->add_exact(static_cast<int64_t>(gradient.nbytes()));
    return ForwardingBackend::allreduce(tensors, opts);
  }
  if (admitted->first_flat) {
    log(LogLevel::kWarning,
        c10::str("compression starts at step ", admitted->step, ", rank ",
                 options_.matrix_approximation_rank, ": a flat gradient of ", gradient.numel(),
                 " elements is compressed as one matrix because its layers are not known; "
                 "torch_powersgd.attach(ddp) compresses layer by layer, which is more accurate"));
  }
  StepInfo step;
  const bool average = opts.reduceOp == c10d::ReduceOp::AVG;
  step.output_scale = average ? 1.0 / getSize() : 1.0;
  step.grad_scale = grad_scale();
  step.step = admitted->step;
  step.same_start = admitted->stateless;
  return allreduce_compressed(admitted->compressor, gradient, step, opts.timeout);
}

c10::intrusive_ptr<c10d::Work> BackendPowerSGD::allreduce_compressed(
    const std::shared_ptr<BucketCompressor>& compressor, const at::Tensor& gradient,
    const StepInfo& step, std::chrono::milliseconds timeout) {
  std::shared_ptr<const StageProbe> probe;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    probe = probe_;
  }
  return engine_of(gradient.device())
      .submit({gradient}, compressed_step(compressor, gradient, step, stats_, std::move(probe)),
              gradient.device(), timeout);
}

c10::intrusive_ptr<c10d::Work> BackendPowerSGD::allreduce_average_exact(at::Tensor gradient,
                                                                        int divisor) {
  // Divided first and by multiplication, as DDP does without a hook: the bits are the same.
  gradient.mul_(1.0 / divisor);
  const int64_t numel = gradient.is_sparse() ? gradient._values().numel() : gradient.numel();
  stats_->add_exact(numel * static_cast<int64_t>(gradient.element_size()));
  std::vector<at::Tensor> tensors = {std::move(gradient)};
  return ForwardingBackend::allreduce(tensors, c10d::AllreduceOptions());
}

c10::intrusive_ptr<c10d::Work> BackendPowerSGD::allreduce_coalesced(
    std::vector<at::Tensor>& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  if (options_.scope != Scope::kAlways) {
    return ForwardingBackend::allreduce_coalesced(tensors, opts);
  }
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  for (const at::Tensor& tensor : tensors) {
    std::vector<at::Tensor> one = {tensor};
    works.push_back(allreduce(one, opts));
  }
  return c10::make_intrusive<CombinedWork>(std::move(works), tensors);
}

void BackendPowerSGD::average_over_channel(std::vector<at::Tensor>& tensors) {
  if (tensors.empty() || getSize() == 1) return;
  const at::Device device = tensors.front().device();
  auto job = [&tensors, size = getSize()](Channel& channel) {
    for (at::Tensor& tensor : tensors) {
      channel.allreduce(tensor);
      tensor.mul_(1.0 / size);
    }
  };
  engine_of(device).submit(tensors, job_alone(std::move(job)), device, c10d::kUnsetTimeout)->wait();
}

void BackendPowerSGD::run_after_steps(c10::Device device, const std::function<void()>& job) {
  engine_of(device)
      .submit({}, job_alone([&job](Channel&) { job(); }), device, c10d::kUnsetTimeout)
      ->wait();
}

c10::intrusive_ptr<c10d::Backend::Options> BackendPowerSGD::getBackendOptions() {
  const auto timeout = ForwardingBackend::getBackendOptions()->timeout;
  return c10::make_intrusive<BackendOptions>(options_, timeout);
}

c10::intrusive_ptr<c10d::Backend> BackendPowerSGD::split(
    const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
    const c10::intrusive_ptr<c10d::Backend::Options>& opts) {
  std::vector<InnerAndChannels> children;
  for (auto& [device, inner] : split_inners(store, ranks, opts)) {
    children.push_back({device, inner, {}});
  }
  const auto channel_store = child_store(store);
  for (size_t i = 0; i < inners_.size(); ++i) {
    for (size_t k = 0; k < inners_[i].channels.size(); ++k) {
      const auto own =
          c10::make_intrusive<c10d::PrefixStore>(c10::str("channel/", i, "/", k), channel_store);
      children[i].channels.push_back(split_inner(inners_[i].channels[k], own, ranks, opts));
    }
  }
  const BackendPtr& first = children.front().inner;
  if (!first) return nullptr;
  const auto* given = dynamic_cast<const BackendOptions*>(opts.get());
  return c10::make_intrusive<BackendPowerSGD>(first->getRank(), first->getSize(),
                                              std::move(children),
                                              given ? given->compression : options_, log_);
}

void BackendPowerSGD::for_each_channel(const std::function<void(c10d::Backend&)>& action) const {
  for (const InnerAndChannels& of : inners_) {
    for (const auto& channel : of.channels) action(*channel);
  }
}

void BackendPowerSGD::setTimeout(std::chrono::milliseconds timeout) {
  ForwardingBackend::setTimeout(timeout);
  for_each_channel([&](c10d::Backend& channel) { channel.setTimeout(timeout); });
}

#ifdef POWERSGD_BACKEND_HAS_LIFECYCLE
void BackendPowerSGD::addEphemeralTimeout(const std::chrono::milliseconds& timeout) {
  ForwardingBackend::addEphemeralTimeout(timeout);
  for_each_channel([&](c10d::Backend& channel) { channel.addEphemeralTimeout(timeout); });
}
#endif

#ifdef C10D_BACKEND_HAS_RECONFIGURE
namespace {

constexpr const char* kCannotReconfigure =
    "powersgd: the group cannot be reconfigured, for new ranks would not have the factors that all "
    "ranks must agree on. Save torch_powersgd.state_dict, create a new group and load it there";

}  // namespace

c10d::ReconfigureHandle BackendPowerSGD::get_reconfigure_handle() const {
  TORCH_CHECK(false, kCannotReconfigure);
}

c10::intrusive_ptr<c10d::Work> BackendPowerSGD::reconfigure(const c10d::ReconfigureOptions&) {
  TORCH_CHECK(false, kCannotReconfigure);
}
#endif

void BackendPowerSGD::shutdown() {
  if (getRank() == 0) {
    if (const std::string message = not_started(); !message.empty()) {
      log(LogLevel::kWarning, message);
    }
  }
  for (const auto& [device, engine] : engines_) engine->shutdown();
  for_each_channel([](c10d::Backend& channel) { channel.shutdown(); });
  ForwardingBackend::shutdown();
}

void BackendPowerSGD::abort() {
  // The channels first: it ends what is in flight, where the inner backend can.
  for_each_channel([](c10d::Backend& channel) { channel.abort(); });
  for (const auto& [device, engine] : engines_) engine->abort();
  ForwardingBackend::abort();
}

void BackendPowerSGD::set_grad_scale(double scale) {
  check_grad_scale(scale);
  const std::lock_guard<std::mutex> lock(mutex_);
  grad_scale_ = scale;
}

double BackendPowerSGD::grad_scale() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return grad_scale_;
}

bool BackendPowerSGD::admits_attached(const powersgd::Options& options) const {
  if (getSize() == 1) return false;
  if (const auto override = current_override()) return override->enabled;
  return options.scope != Scope::kNever;
}

void BackendPowerSGD::add_model(const std::shared_ptr<AttachedModel>& model) {
  const std::lock_guard<std::mutex> lock(mutex_);
  models_.erase(std::remove_if(models_.begin(), models_.end(),
                               [](const auto& weak) { return weak.expired(); }),
                models_.end());
  models_.push_back(model);
  had_model_ = true;
  if (model->compresses()) {
    const int64_t start = model->options().start_powerSGD_iter;
    first_start_ = std::min(first_start_.value_or(start), start);
  }
}

std::vector<std::shared_ptr<AttachedModel>> BackendPowerSGD::models() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::shared_ptr<AttachedModel>> alive;
  for (const auto& weak : models_) {
    if (auto model = weak.lock()) alive.push_back(std::move(model));
  }
  return alive;
}

void BackendPowerSGD::end_step(const powersgd::Options& options) {
  log_warnings();
  if (stats_->add_step() % options.compression_stats_logging_frequency == 0) {
    log(LogLevel::kInfo, summary(snapshot()));
  }
}

void BackendPowerSGD::check_replicas(std::vector<Replica> replicas, c10::Device device) {
  auto job = [replicas = std::move(replicas), rank = getRank(), size = getSize(), stats = stats_,
              warnings = warnings_](Channel& channel) {
    std::vector<std::string> found = restore_agreement(channel, rank, size, replicas);
    stats->add_differences(static_cast<int64_t>(found.size()));
    warnings->add(std::move(found));
  };
  engine_of(device).submit({}, job_alone(std::move(job)), device, c10d::kUnsetTimeout);
}

void BackendPowerSGD::log_warnings() {
  for (const std::string& line : warnings_->take()) log(LogLevel::kWarning, line);
}

std::shared_ptr<StepCounter> BackendPowerSGD::make_step_counter() {
  const std::lock_guard<std::mutex> lock(mutex_);
  step_counters_.push_back(std::make_shared<StepCounter>());
  return step_counters_.back();
}

std::optional<int64_t> BackendPowerSGD::starts_at() const {
  if (getSize() == 1) return std::nullopt;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (had_model_) return first_start_;
  const bool flat = options_.scope == Scope::kBackward || options_.scope == Scope::kAlways;
  return flat ? std::optional(options_.start_powerSGD_iter) : std::nullopt;
}

bool BackendPowerSGD::compressing() const {
  const auto alive = models();
  if (alive.empty()) return stats_->snapshot().compressed_calls > 0;
  return std::any_of(alive.begin(), alive.end(), [this](const auto& model) {
    return model->warm() && model->compresses() && admits_attached(model->options());
  });
}

std::string BackendPowerSGD::not_started(int64_t soon) {
  const std::optional<int64_t> start = starts_at();
  const StatsSnapshot stats = stats_->snapshot();
  if (!start || stats.steps == 0 || stats.compressed_calls > 0) return "";
  if (stats.steps >= *start - soon) return "";
  const std::lock_guard<std::mutex> lock(mutex_);
  if (std::exchange(said_not_started_, true)) return "";
  return c10::str("nothing has been compressed in ", stats.steps,
                  stats.steps == 1 ? " step" : " steps", ": compression starts at step ", *start,
                  ". Set start_powerSGD_iter to start earlier");
}

StatsSnapshot BackendPowerSGD::snapshot() {
  const StatsSnapshot now = total();
  const std::lock_guard<std::mutex> lock(mutex_);
  return now - stats_base_;
}

void BackendPowerSGD::reset_stats() {
  const StatsSnapshot now = total();
  const std::lock_guard<std::mutex> lock(mutex_);
  stats_base_ = now;
}

StatsSnapshot BackendPowerSGD::total() {
  std::vector<std::shared_ptr<StepCounter>> counters;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    counters = step_counters_;
  }
  int64_t skipped = 0, saturated = 0;
  for (const auto& counter : counters) {
    for (const at::Device device : counter->devices()) run_after_steps(device, [] {});
    const StepCounter::Totals totals = counter->totals();
    skipped += totals.skipped;
    saturated += totals.saturated;
  }
  log_warnings();
  StatsSnapshot snapshot = stats_->snapshot();
  snapshot.skipped_steps = skipped;
  snapshot.saturated_steps = saturated;
  return snapshot;
}

void BackendPowerSGD::log(LogLevel level, const std::string& message) const {
  if (log_) log_(level, message);
}

void BackendPowerSGD::set_stage_probe(StageProbe probe) {
  const std::lock_guard<std::mutex> lock(mutex_);
  probe_ = std::make_shared<const StageProbe>(std::move(probe));
}

Engine& BackendPowerSGD::engine_of(c10::Device device) const {
  const auto found = engines_.find(device.type());
  TORCH_CHECK(found != engines_.end(), "powersgd: this group has no inner backend for ", device,
              " tensors");
  return *found->second;
}

}  // namespace powersgd
