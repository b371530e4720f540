// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "powersgd/compressor/compressor.h"

namespace powersgd {

// State that every rank has a replica of. Q and P^ must agree bit for bit.
struct Replica {
  std::string name;  // for messages
  ParameterStatePtr state;
  bool has_p = true;  // false if P^ belongs to a different step on each rank
};

// Compares replicas across ranks by hash, and replaces those that differ with rank `source`'s. No
// residual is lost. Runs as an engine's job, is collective, and waits for the device. Returns a
// line for each replica that differed from rank 0's, the same on all ranks.
std::vector<std::string> restore_agreement(Channel& channel, int rank, int size,
                                           const std::vector<Replica>& replicas, int source = 0);

// Keeps the messages of an engine's thread until a caller's thread logs them. Safe from any thread.
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
