// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <utility>

#include "engine/connection.h"
#include "engine/engine.h"
#include "ranks/thread_ranks.h"

// Jobs for engines, and what ends them.
namespace powersgd::test {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

constexpr Grace kShort{std::chrono::milliseconds(20), std::chrono::milliseconds(5)};
constexpr std::chrono::seconds kNeverReached(300);  // a hang becomes a failure

// The connection of a group of one rank.
inline std::shared_ptr<Connection> connection_of_one() {
  return std::make_shared<Connection>(connected(make_thread_backends(1)[0]));
}

using Part = std::function<void(Channel&)>;

inline Job job_of(Part part) {
  Job job;
  job.parts = {std::move(part)};
  return job;
}
inline Job job_of(Part first, Part second) {
  Job job;
  job.parts = {std::move(first), std::move(second)};
  job.parts_ahead = 1;
  return job;
}

inline WorkPtr submit(Engine& engine, Job job, c10::Device device = at::kCPU) {
  return engine.submit({}, std::move(job), device, c10d::kUnsetTimeout);
}

// Holds a part of a job until it opens.
class Gate {
 public:
  Part part() const {
    return [state = state_](Channel&) {
      state->reached.set_value();
      state->open.get_future().wait();
    };
  }
  void wait_until_reached() const { state_->reached.get_future().wait(); }
  void open() const { state_->open.set_value(); }

 private:
  struct State {
    std::promise<void> reached, open;
  };
  const std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace powersgd::test
