// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "powersgd/compressor/step_counter.h"

namespace powersgd {

// The four stages and the two reductions between them, in the order of a step.
enum class Stage { kProject, kReduceP, kOrthogonalize, kBackProject, kReduceQ, kReconstruct };
constexpr int kStages = 6;
const char* to_string(Stage stage);
// Returns the name that a profiler shows: powersgd::project.
const char* span_name(Stage stage);

struct StatsSnapshot {
  int64_t steps = 0;  // synchronizations of attached models and backward passes of flat tensors
  // Steps in which a gradient was not finite on some rank. The devices count them, and Stats itself
  // leaves this 0.
  int64_t skipped_steps = 0;
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

// The counts of one owner of steps: a model, the flat tensors, or a whole group. Safe from any
// thread.
class Stats {
 public:
  // Everything counted here also counts in `whole`, if there is one.
  explicit Stats(std::shared_ptr<Stats> whole = nullptr) : whole_(std::move(whole)) {}

  // Returns the number of steps including this one, of the whole if there is one.
  int64_t add_step();
  void add_compressed(int64_t bytes_before, int64_t bytes_after);
  void add_exact(int64_t bytes);
  void add_differences(int64_t count);
  void add_seconds(Stage stage, double seconds);
  // Adds the counts of another owner, which this one replaces.
  void add(const StatsSnapshot& counted);
  // Makes the counter of steps that only the devices count. It counts as long as this object lives.
  std::shared_ptr<StepCounter> make_step_counter();

  // The counts that the host knows, since the start.
  StatsSnapshot host_counts() const;

  // All counts since the start or since reset(). Both read from devices(), on which no step may be
  // in flight.
  StatsSnapshot snapshot() const;
  void reset();
  // The devices that count.
  std::vector<at::Device> devices() const;

 private:
  template <typename Change>
  void change(const Change& change);
  StatsSnapshot total() const;

  const std::shared_ptr<Stats> whole_;
  mutable std::mutex mutex_;
  StatsSnapshot now_;
  StatsSnapshot base_;  // what reset() found
  std::vector<std::shared_ptr<StepCounter>> step_counters_;
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
