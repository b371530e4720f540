// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "fake_device/fake_device.h"
#include "kernels/runners/stage_runner.h"

namespace powersgd::test {

// Calls body() for many orders in which the device may run what its streams and events admit. A few
// do for kernels other than the CPU's, which are operations of a stream like these.
inline void in_any_order(fake_device::Host host, const std::function<void()>& body) {
  const unsigned orders = run_cpu_kernels() ? 12 : 2;
  for (unsigned seed = 0; seed < orders; ++seed) {
    SCOPED_TRACE("order " + std::to_string(seed));
    fake_device::reset(seed, host);
    body();
  }
}

// Compares the results of a device in different orders of its streams. All orders give the same
// bits. They are the host's if the device runs the CPU's kernels. Other kernels round otherwise.
class DeviceOutcomes {
 public:
  // `tolerance` holds for other kernels, relative to the largest element of a tensor.
  DeviceOutcomes(std::vector<at::Tensor> of_host, double tolerance)
      : of_host_(std::move(of_host)), tolerance_(tolerance) {
    if (run_cpu_kernels()) of_first_order_ = of_host_;
  }

  void expect_same(const std::vector<at::Tensor>& outcome) {
    ASSERT_EQ(outcome.size(), of_host_.size());
    if (of_first_order_.empty()) of_first_order_ = outcome;
    for (size_t i = 0; i < outcome.size(); ++i) {
      EXPECT_TRUE(at::allclose(outcome[i], of_first_order_[i], 0, 0, /*equal_nan=*/true))
          << "tensor " << i;
      const at::Tensor& host = of_host_[i];
      const double largest = host.nan_to_num().abs().max().item<double>();
      EXPECT_TRUE(at::allclose(outcome[i], host, 0, tolerance_ * largest, /*equal_nan=*/true))
          << "tensor " << i << " is off by "
          << (outcome[i] - host).nan_to_num().abs().max().item<double>() << " of " << largest;
    }
  }

 private:
  const std::vector<at::Tensor> of_host_;
  const double tolerance_;
  std::vector<at::Tensor> of_first_order_;
};

}  // namespace powersgd::test
