// SPDX-License-Identifier: BSD-3-Clause
//
// The steps of a session: their counts, their log, and when compression starts.
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "engine/engine.h"
#include "gradients/replicas.h"
#include "powersgd/attached_model.h"
#include "powersgd/session.h"

namespace powersgd {

void Session::log(LogLevel level, const std::string& message) const {
  if (log_) log_(level, message);
}

void Session::log_warnings() {
  for (const std::string& line : warnings_->take()) log(LogLevel::kWarning, line);
}

void Session::end_step(const powersgd::Options& options, bool captured) {
  log_warnings();
  const bool is_due = stats_->add_step() % options.compression_stats_logging_frequency == 0;
  if (is_due && !captured) {
    log(LogLevel::kInfo, summary(snapshot()));
  }
}

std::shared_ptr<StepCounter> Session::make_step_counter() {
  const std::lock_guard<std::mutex> lock(mutex_);
  step_counters_.push_back(std::make_shared<StepCounter>());
  return step_counters_.back();
}

// A single rank may ask for its counts, even inside a backward pass. So the job is local: it leaves
// the order of the steps' collectives as it is.
void Session::wait_for_steps(c10::Device device) const {
  Job job;
  job.second = [](Channel&) {};
  job.local = true;
  engine_of(device).submit({}, std::move(job), device, c10d::kUnsetTimeout)->wait();
}

StatsSnapshot Session::total() {
  std::vector<std::shared_ptr<StepCounter>> counters;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    counters = step_counters_;
  }
  int64_t skipped = 0, saturated = 0;
  for (const auto& counter : counters) {
    for (const at::Device device : counter->devices()) wait_for_steps(device);
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

StatsSnapshot Session::snapshot() {
  const StatsSnapshot now = total();
  const std::lock_guard<std::mutex> lock(mutex_);
  return now - stats_base_;
}

void Session::reset_stats() {
  const StatsSnapshot now = total();
  const std::lock_guard<std::mutex> lock(mutex_);
  stats_base_ = now;
}

void Session::add_model(const std::shared_ptr<AttachedModel>& model) {
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

std::vector<std::shared_ptr<AttachedModel>> Session::models() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::shared_ptr<AttachedModel>> alive;
  for (const auto& weak : models_) {
    if (auto model = weak.lock()) alive.push_back(std::move(model));
  }
  return alive;
}

bool Session::had_model() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return had_model_;
}

std::shared_ptr<AttachedModel> Session::model_that_expects(
    const std::vector<at::Tensor>& tensors) const {
  if (tensors.size() != 1 || !tensors.front().has_storage()) return nullptr;
  const auto alive = models();
  const auto found = std::find_if(alive.begin(), alive.end(), [&](const auto& model) {
    return model->expects(tensors.front());
  });
  return found != alive.end() ? *found : nullptr;
}

std::optional<int64_t> Session::starts_at() const {
  if (size_ == 1) return std::nullopt;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (had_model_) return first_start_;
  const bool flat = options_.scope == Scope::kBackward || options_.scope == Scope::kAlways;
  return flat ? std::optional(options_.start_powerSGD_iter) : std::nullopt;
}

bool Session::compressing() const {
  const auto alive = models();
  if (alive.empty()) return stats_->snapshot().compressed_calls > 0;
  return std::any_of(alive.begin(), alive.end(), [this](const auto& model) {
    return model->warm() && model->compresses() && admits_attached(model->options());
  });
}

std::string Session::not_started(int64_t soon) {
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

}  // namespace powersgd
