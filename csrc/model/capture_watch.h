// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "powersgd/compressor/parameter_state.h"
#include "powersgd/group/session.h"

namespace powersgd {

// Purpose: finds the parameters of which this rank has long sent little. It samples one step in
// many, so the pass over the residuals costs next to nothing.
//
// Contract: the host never waits. A sample that has not ended is read later.
//
// Threads: one at a time.
class CaptureWatch {
 public:
  static constexpr uint64_t kInterval = 25;       // steps from one sample to the next
  static constexpr int kSamples = 4;              // this many low samples in a row are too many
  static constexpr double kLeastCaptured = 0.02;  // |q|^2 / |M|^2 below it is low

  // Samples the last step, after all submitted steps.
  void sample(Session& session, c10::Device device, const std::vector<ParameterStatePtr>& states);

  // Reads the samples that have ended. Returns the states that have been low for too long.
  std::vector<ParameterStatePtr> low();

 private:
  struct Sample {
    std::vector<ParameterStatePtr> states;
    // [3, states] on the host: the norms of q_local, of M, and of what the step delivered.
    std::shared_ptr<at::Tensor> norms;
    c10::intrusive_ptr<c10d::Work> work;
  };
  void count(const Sample& sample);

  std::deque<Sample> samples_;
  std::map<const ParameterState*, int> low_in_a_row_;
};

// Returns the warning about the parameters that have been low for too long.
std::string low_capture_warning(const std::vector<std::string>& names);

}  // namespace powersgd
