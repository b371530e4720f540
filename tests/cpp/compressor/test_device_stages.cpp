// SPDX-License-Identifier: BSD-3-Clause
#include "compressor/device_stages.h"

#include <gtest/gtest.h>

#include "support/errors.h"

namespace powersgd {
namespace {

TEST(Stages, TheCpuHasKernelsInEveryBuild) {
  EXPECT_EQ(find_stages(c10::DeviceType::CPU), &require_stages(c10::DeviceType::CPU));
}

TEST(Stages, AnErrorNamesTheDeviceThatHasNoKernels) {
  EXPECT_EQ(find_stages(c10::DeviceType::XPU), nullptr);
  const std::string error = test::error_of([] { require_stages(c10::DeviceType::XPU); });
  EXPECT_TRUE(test::contains(error, "no kernels for xpu tensors")) << error;
}

TEST(Stages, ADeviceTypeHasTheStagesThatAreAdded) {
  const Stages& cpu = require_stages(c10::DeviceType::CPU);
  add_stages(c10::DeviceType::HPU, cpu);
  EXPECT_EQ(find_stages(c10::DeviceType::HPU), &cpu);
  EXPECT_EQ(find_stages(c10::DeviceType::XPU), nullptr);
}

TEST(Stages, TheCpuCapturesNothing) { EXPECT_FALSE(is_capturing(at::kCPU)); }

}  // namespace
}  // namespace powersgd
