// SPDX-License-Identifier: BSD-3-Clause
#include "powersgd/compressor/step_counter.h"

#include <ATen/ATen.h>

#include "powersgd/kernels/kernels.h"

namespace powersgd {

kernels::StepCount* StepCounter::on(at::Device device) {
  const std::lock_guard<std::mutex> lock(mutex_);
  static_assert(sizeof(kernels::StepCount) == 2 * sizeof(int64_t));
  for (at::Tensor& count : counts_) {
    if (count.device() == device) return static_cast<kernels::StepCount*>(count.data_ptr());
  }
  counts_.push_back(at::zeros({2}, at::device(device).dtype(at::kLong)));
  return static_cast<kernels::StepCount*>(counts_.back().data_ptr());
}

int64_t StepCounter::skipped_steps() {
  const std::lock_guard<std::mutex> lock(mutex_);
  int64_t total = 0;
  for (const at::Tensor& on_device : counts_) {
    const at::Tensor steps = on_device.cpu();
    const auto* count = static_cast<const kernels::StepCount*>(steps.data_ptr());
    total += static_cast<int64_t>(count->count);
  }
  return total;
}

std::vector<at::Device> StepCounter::devices() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<at::Device> devices;
  for (const at::Tensor& count : counts_) devices.push_back(count.device());
  return devices;
}

}  // namespace powersgd
