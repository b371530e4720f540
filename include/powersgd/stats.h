// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>

namespace powersgd {

// The four stages and the two reductions between them, in the order of a step.
enum class Stage { kProject, kReduceP, kOrthogonalize, kBackProject, kReduceQ, kReconstruct };
constexpr int kStages = 6;
const char* to_string(Stage stage);
// Returns the name that a profiler shows: powersgd::project.
const char* span_name(Stage stage);

struct StatsSnapshot {
  int64_t steps = 0;  // synchronizations of attached models and backward passes of flat tensors
  // The devices count the next two, and Stats itself leaves them 0.
  int64_t skipped_steps = 0;    // steps in which a gradient was not finite on some rank
  int64_t saturated_steps = 0;  // steps that cut a float16 residual off at 65504
  int64_t compressed_calls = 0;
  int64_t exact_calls = 0;   // eligible gradients sent whole: warm-up, or nothing worth compressing
  int64_t bytes_before = 0;  // the gradients, had they been sent whole
  int64_t bytes_after = 0;   // this rank's payloads in their place, or its packets
  // The share of the compressed calls in both.
  int64_t compressed_bytes_before = 0;
  int64_t compressed_bytes_after = 0;
  int64_t differences = 0;  // replicas that check_every found to differ between the ranks
  std::array<double, kStages> seconds{};  // on the engine's thread

  double ratio() const { return bytes_after > 0 ? double(bytes_before) / double(bytes_after) : 1; }
};

// Subtracts the counts of `base` from those of `now`.
StatsSnapshot operator-(StatsSnapshot now, const StatsSnapshot& base);

// The counts of one session. Safe from any thread.
class Stats {
 public:
  // Returns the number of steps including this one.
  int64_t add_step();
  void add_compressed(int64_t bytes_before, int64_t bytes_after);
  void add_exact(int64_t bytes);
  void add_differences(int64_t count);
  void add_seconds(Stage stage, double seconds);
  StatsSnapshot snapshot() const;

 private:
  mutable std::mutex mutex_;
  StatsSnapshot now_;
};

// One line for the log.
std::string summary(const StatsSnapshot& stats);

// Adds the lifetime of the object to a stage's seconds.
class StageTimer {
 public:
  StageTimer(Stats& stats, Stage stage)
      : stats_(stats), stage_(stage), start_(std::chrono::steady_clock::now()) {}
  ~StageTimer() {
    const std::chrono::duration<double> life = std::chrono::steady_clock::now() - start_;
    stats_.add_seconds(stage_, life.count());
  }
  StageTimer(const StageTimer&) = delete;
  StageTimer& operator=(const StageTimer&) = delete;

 private:
  Stats& stats_;
  const Stage stage_;
  const std::chrono::steady_clock::time_point start_;
};

}  // namespace powersgd
