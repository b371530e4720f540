// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <mutex>
#include <vector>

namespace powersgd {

namespace kernels {
struct StepCount;
}  // namespace kernels

// Counts the skipped steps of one owner (a model) over all of its buckets. The kernels count,
// because the device is the first to know whether a step is skipped. Safe from any thread.
class StepCounter {
 public:
  // The count that the kernels of a device add to.
  kernels::StepCount* on(at::Device device);

  // Synchronizes with the devices. No step may be in flight.
  int64_t skipped_steps();

  // The devices that count.
  std::vector<at::Device> devices();

 private:
  std::mutex mutex_;
  std::vector<at::Tensor> counts_;  // one per device
};

}  // namespace powersgd
