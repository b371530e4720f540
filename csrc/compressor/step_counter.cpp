// SPDX-License-Identifier: BSD-3-Clause
#include "powersgd/step_counter.h"

#include <ATen/ATen.h>

#include "powersgd/kernels.h"

namespace powersgd {

kernels::StepCounts* StepCounter::on(at::Device device) {
  const std::lock_guard<std::mutex> lock(mutex_);
  static_assert(sizeof(kernels::StepCounts) == 4 * sizeof(int64_t));
  for (at::Tensor& count : counts_) {
    if (count.device() == device) return static_cast<kernels::StepCounts*>(count.data_ptr());
  }
  counts_.push_back(at::zeros({4}, at::device(device).dtype(at::kLong)));
  return static_cast<kernels::StepCounts*>(counts_.back().data_ptr());
}

StepCounter::Totals StepCounter::totals() {
  const std::lock_guard<std::mutex> lock(mutex_);
  Totals totals;
  for (const at::Tensor& device_counts : counts_) {
    const at::Tensor counts = device_counts.cpu();
    const auto* steps = static_cast<const kernels::StepCounts*>(counts.data_ptr());
    totals.skipped += static_cast<int64_t>(steps->skipped.count);
    totals.saturated += static_cast<int64_t>(steps->saturated.count);
  }
  return totals;
}

std::vector<at::Device> StepCounter::devices() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<at::Device> devices;
  for (const at::Tensor& count : counts_) devices.push_back(count.device());
  return devices;
}

}  // namespace powersgd
