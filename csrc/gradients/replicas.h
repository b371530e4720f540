// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "powersgd/compressor.h"

namespace powersgd {

// State of which each rank has a replica: Q and P^ must agree bit for bit.
struct Replica {
  std::string name;  // for messages
  ParameterStatePtr state;
  bool has_p = true;  // false: P^ is of another step on each rank
};

// Compares replicas over the ranks by a hash of each and gives every rank those of rank 0 where
// they differ; no residual is lost by it. A job of an engine: collective, and it waits for the
// device. Returns a line for each replica that differed, the same on all ranks.
std::vector<std::string> restore_agreement(Channel& channel, int rank, int size,
                                           const std::vector<Replica>& replicas);

// What an engine's thread has to say, until a caller's thread says it. Safe from any thread.
class Messages {
 public:
  void add(std::vector<std::string> lines) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (std::string& line : lines) lines_.push_back(std::move(line));
  }
  std::vector<std::string> take() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(lines_, {});
  }

 private:
  std::mutex mutex_;
  std::vector<std::string> lines_;
};

}  // namespace powersgd
