// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <mutex>
#include <vector>

namespace powersgd {

namespace kernels {
struct StepCounts;
}  // namespace kernels

// Counts the skipped and the saturated steps of one owner (a model) over all of its buckets. The
// kernels count, because the device is the first to know whether a step is skipped. Safe from any
// thread.
class StepCounter {
 public:
  struct Totals {
    int64_t skipped = 0;
    int64_t saturated = 0;
  };

  // The counts that the kernels of a device add to.
  kernels::StepCounts* on(at::Device device);

  // Synchronizes with the devices. No step may be in flight.
  Totals totals();

  // The devices that count.
  std::vector<at::Device> devices();

 private:
  std::mutex mutex_;
  std::vector<at::Tensor> counts_;  // one per device
};

}  // namespace powersgd
