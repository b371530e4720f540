// SPDX-License-Identifier: BSD-3-Clause
#include "powersgd/model/named_tensors.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "fake_device/fake_device.h"
#include "group/sessions.h"
#include "support/hook_defaults.h"

namespace powersgd {
namespace {

namespace fake = test::fake_device;

const test::Shapes kNamedShapes = {{24, 32}, {24}, {20, 36}};
constexpr int64_t kNamedNumel = 24 * 32 + 24 + 20 * 36;
constexpr size_t kBucketBytes = 1 << 20;
constexpr int kNamedSteps = 3;

// The fake device's own views have storages of their own.
std::vector<at::Tensor> views_of(const at::Tensor& buffer) {
  std::vector<at::Tensor> views;
  int64_t offset = 1;  // as in the middle of a larger buffer
  for (const auto& shape : kNamedShapes) {
    views.push_back(buffer.detach());
    views.back().unsafeGetTensorImpl()->set_sizes_contiguous(shape);
    views.back().unsafeGetTensorImpl()->set_storage_offset(offset);
    offset += views.back().numel();
  }
  return views;
}

class NamedTensorsOnDevice : public testing::Test {
 protected:
  NamedTensorsOnDevice() {
    fake::add_operators();
    fake::reset(1, fake::Host::kMayNotWait);
    const auto model = test::attach(test::session_of_equal_ranks(device_, test::compressing(2)),
                                    test::zeros(kNamedShapes, device_));
    named_tensors_ = std::make_unique<NamedTensors>(model, kBucketBytes);
    buffer_ = at::ones({kNamedNumel + 1}, device_);
  }

  // Takes steps, and returns what the last one used.
  fake::Usage use_of(const std::vector<at::Tensor>& tensors) {
    fake::Usage before;
    for (int step = 0; step < kNamedSteps; ++step) {
      fake::run();
      before = fake::usage();
      named_tensors_->all_reduce(tensors)->wait();
    }
    const fake::Usage after = fake::usage();
    fake::run();
    return {after.allocations - before.allocations, after.bytes - before.bytes, 0, 0,
            after.operators - before.operators};
  }

  const at::Device device_ = fake::device(0);
  std::unique_ptr<NamedTensors> named_tensors_;
  at::Tensor buffer_;
};

TEST_F(NamedTensorsOnDevice, SideBySideAreReducedWhereTheyAre) {
  const fake::Usage used = use_of(views_of(buffer_));
  EXPECT_EQ(used.allocations, 0u);
  EXPECT_EQ(used.operators, 0u);
}

TEST_F(NamedTensorsOnDevice, OthersArePacked) {
  std::vector<at::Tensor> tensors = views_of(buffer_);
  tensors[1] = at::ones(kNamedShapes[1], device_);
  EXPECT_EQ(use_of(tensors).allocations, 1u);
}

}  // namespace
}  // namespace powersgd
