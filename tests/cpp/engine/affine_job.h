// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "fake_device/fake_device.h"

namespace powersgd::test {

// A tensor x on the fake device and a job that makes it 4 x + 2 in a group of two equal ranks. Its
// first part makes the payload x + 0.5 and sums it, its second part sums the payload again, and its
// third copies it to x. A missing order between streams shows as another number.
class AffineJob {
 public:
  explicit AffineJob(c10::Device device, int64_t numel = 2)
      : device_(device),
        x_(static_cast<size_t>(numel), -1.0F),
        payload_memory_(static_cast<size_t>(numel), -1.0F),
        tensor_(fake_device::tensor(device, x_)),
        payload_(fake_device::tensor(device, payload_memory_)) {}

  // Sets x, on the current stream.
  void fill(float value) {
    fake_device::enqueue(device_, [this, value] { std::fill(x_.begin(), x_.end(), value); });
  }

  c10::intrusive_ptr<c10d::Work> submit(Engine& engine, bool more_follow = false) {
    Job job;
    job.parts_ahead = 1;
    job.parts.emplace_back([this](Channel& channel) {
      fake_device::enqueue(device_, [this] {
        for (size_t i = 0; i < x_.size(); ++i) payload_memory_[i] = x_[i] + 0.5F;
      });
      channel.allreduce(payload_);
    });
    job.parts.emplace_back([this](Channel& channel) { channel.allreduce(payload_); });
    job.parts.emplace_back(
        [this](Channel&) { fake_device::enqueue(device_, [this] { x_ = payload_memory_; }); });
    job.changes = {this};
    job.more_follow = more_follow;
    return engine.submit({tensor_}, std::move(job), device_, c10d::kUnsetTimeout);
  }

  // The last element of x when the device comes to this point of the current stream.
  std::shared_ptr<float> read() {
    auto seen = std::make_shared<float>(-1.0F);
    fake_device::enqueue(device_, [this, seen] { *seen = x_.back(); });
    return seen;
  }

  // Lets the device run, and compares what read() gives here.
  void expect(float value) {
    const auto seen = read();
    fake_device::run();
    EXPECT_EQ(*seen, value);
  }

  const at::Tensor& tensor() const { return tensor_; }

 private:
  const c10::Device device_;
  std::vector<float> x_, payload_memory_;
  at::Tensor tensor_, payload_;
};

}  // namespace powersgd::test
