// SPDX-License-Identifier: BSD-3-Clause
#include "powersgd/stats.h"

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

StatsSnapshot operator-(StatsSnapshot now, const StatsSnapshot& base) {
  for (const auto count :
       {&StatsSnapshot::steps, &StatsSnapshot::skipped_steps, &StatsSnapshot::saturated_steps,
        &StatsSnapshot::compressed_calls, &StatsSnapshot::exact_calls, &StatsSnapshot::bytes_before,
        &StatsSnapshot::bytes_after, &StatsSnapshot::compressed_bytes_before,
        &StatsSnapshot::compressed_bytes_after, &StatsSnapshot::differences}) {
    now.*count -= base.*count;
  }
  for (size_t stage = 0; stage < now.seconds.size(); ++stage) {
    now.seconds[stage] -= base.seconds[stage];
  }
  return now;
}

int64_t Stats::add_step() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return ++now_.steps;
}

void Stats::add_compressed(int64_t bytes_before, int64_t bytes_after) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++now_.compressed_calls;
  now_.bytes_before += bytes_before;
  now_.bytes_after += bytes_after;
  now_.compressed_bytes_before += bytes_before;
  now_.compressed_bytes_after += bytes_after;
}

void Stats::add_exact(int64_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++now_.exact_calls;
  now_.bytes_before += bytes;
  now_.bytes_after += bytes;
}

void Stats::add_differences(int64_t count) {
  const std::lock_guard<std::mutex> lock(mutex_);
  now_.differences += count;
}

void Stats::add_seconds(Stage stage, double seconds) {
  const std::lock_guard<std::mutex> lock(mutex_);
  now_.seconds[static_cast<size_t>(stage)] += seconds;
}

StatsSnapshot Stats::snapshot() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return now_;
}

std::string summary(const StatsSnapshot& stats) {
  char saturated[64] = "";
  if (stats.saturated_steps > 0) {
    std::snprintf(saturated, sizeof(saturated), ", %lld with a saturated residual",
                  static_cast<long long>(stats.saturated_steps));
  }
  char line[256];
  std::snprintf(line, sizeof(line),
                "%lld steps (%lld skipped%s): %.1f MB of gradients sent as %.1f MB, ratio %.1f; "
                "%lld calls compressed, %lld exact",
                static_cast<long long>(stats.steps), static_cast<long long>(stats.skipped_steps),
                saturated, stats.bytes_before / 1e6, stats.bytes_after / 1e6, stats.ratio(),
                static_cast<long long>(stats.compressed_calls),
                static_cast<long long>(stats.exact_calls));
  return line;
}

}  // namespace powersgd
