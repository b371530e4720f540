// SPDX-License-Identifier: BSD-3-Clause
//
// The steps of a session: their counts, their log, and when compression starts.
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "engine/engine.h"
#include "group/replicas.h"
#include "powersgd/group/allreduce_taker.h"
#include "powersgd/group/session.h"

namespace powersgd {
namespace {

std::string not_started_message(const StatsSnapshot& now, std::optional<int64_t> starts_at,
                                int64_t soon, bool attached) {
  if (!starts_at || now.steps == 0 || now.compressed_calls > 0) return "";
  if (now.steps >= *starts_at - soon) return "";
  return c10::str("nothing has been compressed in ", now.steps, now.steps == 1 ? " step" : " steps",
                  ": compression starts at step ", *starts_at,
                  attached ? ". Lower start_powerSGD_iter, or the warmup_steps of local steps, to "
                             "start earlier"
                           : ", and no module is attached. Call torch_powersgd.attach, or lower "
                             "start_powerSGD_iter to start earlier");
}

}  // namespace

void Session::log(LogLevel level, const std::string& message) const {
  if (log_) log_(level, message);
}

void Session::log_warnings() {
  for (const std::string& line : warnings_->take()) log(LogLevel::kWarning, line);
}

void Session::end_step(Stats& stats, const powersgd::Options& options, bool captured) {
  log_warnings();
  const bool is_due = stats.add_step() % options.compression_stats_logging_frequency == 0;
  if (is_due && !captured) {
    log(LogLevel::kInfo, summary(snapshot()));
  }
}

// A single rank may ask for its counts, even inside a backward pass. So the job is local: it does
// not change the order of the steps' collectives. An engine that has ended is not waited for, since
// its last step may hang until the backend's timeout; the counts are then those so far.
void Session::wait_for_steps(c10::Device device) const {
  Job job;
  job.parts = {[](Channel&) {}};
  job.local = true;
  try {
    engine_of(device).submit({}, std::move(job), device, c10d::kUnsetTimeout)->wait();
  } catch (const c10::DistBackendError&) {
    return;
  }
}

StatsSnapshot Session::snapshot(Stats& stats) {
  for (const at::Device device : stats.devices()) wait_for_steps(device);
  log_warnings();
  return stats.snapshot();
}

void Session::reset_stats(Stats& stats) {
  for (const at::Device device : stats.devices()) wait_for_steps(device);
  log_warnings();
  stats.reset();
}

void Session::note_attached(std::optional<int64_t> starts_at) {
  const std::lock_guard<std::mutex> lock(mutex_);
  was_attached_ = true;
  if (starts_at) first_start_ = std::min(first_start_.value_or(*starts_at), *starts_at);
}

bool Session::was_attached() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return was_attached_;
}

void Session::add_taker(const std::weak_ptr<AllreduceTaker>& taker) {
  const std::lock_guard<std::mutex> lock(mutex_);
  takers_.erase(std::remove_if(takers_.begin(), takers_.end(),
                               [](const auto& weak) { return weak.expired(); }),
                takers_.end());
  takers_.push_back(taker);
}

std::shared_ptr<AllreduceTaker> Session::taker_of(const std::vector<at::Tensor>& tensors) const {
  if (tensors.size() != 1 || !tensors.front().has_storage()) return nullptr;
  std::vector<std::weak_ptr<AllreduceTaker>> takers;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    takers = takers_;
  }
  for (const auto& weak : takers) {
    auto taker = weak.lock();
    if (taker && taker->expects(tensors.front())) return taker;
  }
  return nullptr;
}

std::optional<int64_t> Session::starts_at() const {
  if (size_ == 1) return std::nullopt;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (was_attached_) return first_start_;
  if (options_.scope != Scope::kBackward) return std::nullopt;
  return options_.start_powerSGD_iter;
}

std::string Session::not_started(int64_t soon) {
  const std::string message =
      not_started_message(stats_->host_counts(), starts_at(), soon, was_attached());
  if (message.empty()) return "";
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(said_not_started_, true) ? "" : message;
}

std::string Session::not_started(const Stats& stats, std::optional<int64_t> starts_at,
                                 int64_t soon) {
  std::string message = not_started_message(stats.host_counts(), starts_at, soon, true);
  const std::lock_guard<std::mutex> lock(mutex_);
  said_not_started_ = said_not_started_ || !message.empty();
  return message;
}

}  // namespace powersgd
