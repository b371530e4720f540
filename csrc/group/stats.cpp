// SPDX-License-Identifier: BSD-3-Clause
#include "powersgd/group/stats.h"

#include <algorithm>
#include <cstdio>
#include <string>

namespace powersgd {

const char* span_name(Stage stage) {
  static constexpr const char* kNames[kStages] = {
      "powersgd::project",      "powersgd::reduce_p", "powersgd::orthogonalize",
      "powersgd::back_project", "powersgd::reduce_q", "powersgd::reconstruct"};
  return kNames[static_cast<int>(stage)];
}

const char* to_string(Stage stage) {
  return span_name(stage) + std::char_traits<char>::length("powersgd::");
}

namespace {

// Adds `sign` times the counts of `other`.
void add_times(StatsSnapshot& now, const StatsSnapshot& other, int sign) {
  for (const auto count :
       {&StatsSnapshot::steps, &StatsSnapshot::skipped_steps, &StatsSnapshot::compressed_calls,
        &StatsSnapshot::exact_calls, &StatsSnapshot::bytes_before, &StatsSnapshot::bytes_after,
        &StatsSnapshot::compressed_bytes_before, &StatsSnapshot::compressed_bytes_after,
        &StatsSnapshot::differences}) {
    now.*count += sign * (other.*count);
  }
  for (size_t stage = 0; stage < now.seconds.size(); ++stage) {
    now.seconds[stage] += sign * other.seconds[stage];
  }
}

}  // namespace

StatsSnapshot operator-(StatsSnapshot now, const StatsSnapshot& base) {
  add_times(now, base, -1);
  return now;
}

template <typename Change>
void Stats::change(const Change& change) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    change(now_);
  }
  if (whole_) whole_->change(change);
}

int64_t Stats::add_step() {
  int64_t steps = 0;
  change([&](StatsSnapshot& now) { steps = ++now.steps; });
  return steps;
}

void Stats::add_compressed(int64_t bytes_before, int64_t bytes_after) {
  change([=](StatsSnapshot& now) {
    ++now.compressed_calls;
    now.bytes_before += bytes_before;
    now.bytes_after += bytes_after;
    now.compressed_bytes_before += bytes_before;
    now.compressed_bytes_after += bytes_after;
  });
}

void Stats::add_exact(int64_t bytes) {
  change([=](StatsSnapshot& now) {
    ++now.exact_calls;
    now.bytes_before += bytes;
    now.bytes_after += bytes;
  });
}

void Stats::add_differences(int64_t count) {
  change([=](StatsSnapshot& now) { now.differences += count; });
}

void Stats::add_seconds(Stage stage, double seconds) {
  change([=](StatsSnapshot& now) { now.seconds[static_cast<size_t>(stage)] += seconds; });
}

void Stats::add(const StatsSnapshot& counted) {
  const std::lock_guard<std::mutex> lock(mutex_);
  add_times(now_, counted, 1);
}

std::shared_ptr<StepCounter> Stats::make_step_counter() {
  auto counter = std::make_shared<StepCounter>();
  for (Stats* stats = this; stats != nullptr; stats = stats->whole_.get()) {
    const std::lock_guard<std::mutex> lock(stats->mutex_);
    stats->step_counters_.push_back(counter);
  }
  return counter;
}

StatsSnapshot Stats::host_counts() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return now_;
}

StatsSnapshot Stats::snapshot() const {
  const StatsSnapshot now = total();
  const std::lock_guard<std::mutex> lock(mutex_);
  return now - base_;
}

void Stats::reset() {
  const StatsSnapshot now = total();
  const std::lock_guard<std::mutex> lock(mutex_);
  base_ = now;
}

std::vector<at::Device> Stats::devices() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<at::Device> all;
  for (const auto& counter : step_counters_) {
    for (const at::Device device : counter->devices()) {
      if (std::find(all.begin(), all.end(), device) == all.end()) all.push_back(device);
    }
  }
  return all;
}

// The counters are read without the lock, because the host waits for their devices.
StatsSnapshot Stats::total() const {
  std::vector<std::shared_ptr<StepCounter>> counters;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    counters = step_counters_;
  }
  StatsSnapshot total = host_counts();
  for (const auto& counter : counters) {
    total.skipped_steps += counter->skipped_steps();
  }
  return total;
}

std::string summary(const StatsSnapshot& stats) {
  char line[256];
  std::snprintf(line, sizeof(line),
                "%lld steps (%lld skipped): %.1f MB of gradients sent as %.1f MB, ratio %.1f; "
                "%lld calls compressed, %lld exact",
                static_cast<long long>(stats.steps), static_cast<long long>(stats.skipped_steps),
                stats.bytes_before / 1e6, stats.bytes_after / 1e6, stats.ratio(),
                static_cast<long long>(stats.compressed_calls),
                static_cast<long long>(stats.exact_calls));
  return line;
}

}  // namespace powersgd
