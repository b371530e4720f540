// SPDX-License-Identifier: BSD-3-Clause
//
// Compression in a group that is ordered by streams, on a device that runs enqueued operations in
// any order that streams and events admit.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "engine/stream_engine.h"
#include "fake_device/fake_device.h"
#include "gradients/compressed_step.h"
#include "gradients/device_outcomes.h"
#include "gradients/flat_tensors.h"
#include "gradients/session_of_equal_ranks.h"
#include "powersgd/stats.h"
#include "ranks/one_rank.h"
#include "ranks/two_equal_ranks.h"
#include "support/hook_defaults.h"

namespace powersgd {
namespace {

namespace fake = test::fake_device;

constexpr uint64_t kSteps = 4;

at::Tensor gradient_of(uint64_t step, int64_t numel) {
  at::manual_seed(step + 1);
  return at::randn({numel});
}

// Returns the outputs of `kSteps` steps on the CPU.
std::vector<at::Tensor> outputs_on_host(const Options& options) {
  struct HostChannel : Channel {
    void allreduce(at::Tensor& payload) override { test::sum_over_ranks(payload); }
    void allgather(at::Tensor& output, at::Tensor& input) override {
      test::gather_from_ranks(output, input);
    }
    void alltoall(at::Tensor&, at::Tensor&) override { FAIL() << "two ranks gather"; }
  } channel;
  test::OneRank rank(options, at::kFloat, at::kCPU, {0, 2});
  const std::shared_ptr<BucketCompressor> compressor = std::move(rank.compressor);
  std::vector<at::Tensor> outputs;
  for (uint64_t step = 0; step < kSteps; ++step) {
    outputs.push_back(gradient_of(step, rank.plan.gradient_numel));
    const Job job = compressed_step(compressor, outputs.back(), {0.5, 1, step},
                                    std::make_shared<Stats>(), nullptr);
    job.first(channel);
    job.second(channel);
  }
  return outputs;
}

// A bucket with its gradients and outputs, by step.
struct Bucket {
  std::shared_ptr<BucketCompressor> compressor;
  std::vector<std::vector<float>> gradients;
  std::vector<at::Tensor> outputs;
};

// Submits the same steps of each of some buckets on the device, on the caller's stream.
std::vector<Bucket> submit_steps(Engine& engine, const Options& options, c10::Device device,
                                 size_t count) {
  std::vector<Bucket> buckets(count);
  for (Bucket& bucket : buckets) {
    bucket.compressor = std::move(test::OneRank(options, at::kFloat, device, {0, 2}).compressor);
    bucket.gradients.resize(kSteps);
    bucket.outputs.resize(kSteps);
  }
  const int64_t numel = test::OneRank(options).plan.gradient_numel;
  for (uint64_t step = 0; step < kSteps; ++step) {
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    for (Bucket& bucket : buckets) {
      std::vector<float>& memory = bucket.gradients[step];
      memory.assign(static_cast<size_t>(numel), -1.0F);
      const at::Tensor tensor = fake::tensor(device, memory);
      fake::enqueue(device, [&memory, gradient = gradient_of(step, numel)] {
        std::copy_n(gradient.const_data_ptr<float>(), memory.size(), memory.data());
      });
      Job job = compressed_step(bucket.compressor, tensor, {0.5, 1, step},
                                std::make_shared<Stats>(), nullptr);
      job.more_follow = &bucket != &buckets.back();
      works.push_back(engine.submit({tensor}, std::move(job), device, c10d::kUnsetTimeout));
    }
    for (size_t i = 0; i < count; ++i) {
      works[i]->wait();
      Bucket& bucket = buckets[i];
      fake::enqueue(device, [&memory = bucket.gradients[step], &output = bucket.outputs[step]] {
        output = at::tensor(memory);
      });
    }
  }
  return buckets;
}

class CompressionOnDevice : public testing::TestWithParam<std::optional<WireDType>> {
};  // wire_dtype

TEST_P(CompressionOnDevice, IsTheSameInAnyOrderOfStreams) {
  fake::add_operators();
  Options options = test::hook_defaults();
  options.matrix_approximation_rank = 2;
  options.wire_dtype = GetParam();
  // An element may be rounded to the other of two values.
  double tolerance = options.wire_dtype ? 2e-2 : 1e-4;
  if (options.wire_dtype == WireDType::kInt4) tolerance = 0.5;
  test::DeviceOutcomes outcomes(outputs_on_host(options), tolerance);
  for (unsigned seed = 0; seed < 25; ++seed) {
    SCOPED_TRACE("order " + std::to_string(seed));
    fake::reset(seed, fake::Host::kMayNotWait);
    StreamEngine engine(0, c10::make_intrusive<test::StreamBackend>());
    const auto here = submit_steps(engine, options, fake::device(0), 1);
    fake::use_new_stream(fake::device(0));
    const auto there = submit_steps(engine, options, fake::device(1), 3);
    fake::run();
    for (const auto* buckets : {&here, &there}) {
      for (const Bucket& bucket : *buckets) outcomes.expect_same(bucket.outputs);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Wires, CompressionOnDevice,
                         testing::Values(std::nullopt, WireDType::kBFloat16, WireDType::kFloat16,
                                         WireDType::kInt8, WireDType::kInt4),
                         [](const auto& wire) {
                           return wire.param ? to_string(*wire.param) : "as_it_is";
                         });

// Returns the outputs of tensors without an attached model.
std::vector<at::Tensor> reduce_flat(at::Device device) {
  Options options = test::hook_defaults();
  options.scope = Scope::kAlways;
  options.start_powerSGD_iter = 0;
  options.min_numel = 1000;
  const auto session = test::make_session_of_equal_ranks(device, options);
  FlatTensors flat_tensors(session);
  std::vector<at::Tensor> outputs;
  for (uint64_t step = 0; step < kSteps; ++step) {
    for (const int64_t numel : {2500, 3000, 2500}) {
      std::vector<at::Tensor> tensors = {gradient_of(step, numel).to(device)};
      const auto work = flat_tensors.reduce(tensors, {});
      EXPECT_TRUE(work);
      work->wait();
      outputs.push_back(tensors[0].clone());
    }
  }
  fake::let_host_wait();
  EXPECT_EQ(session->snapshot().compressed_calls, 3 * static_cast<int64_t>(kSteps));
  for (at::Tensor& output : outputs) output = output.cpu();
  return outputs;
}

TEST(FlatTensorsOnDevice, AreTheSameInAnyOrderOfStreams) {
  fake::add_operators();
  test::DeviceOutcomes outcomes(reduce_flat(at::kCPU), 1e-4);
  for (unsigned seed = 0; seed < 20; ++seed) {
    SCOPED_TRACE("order " + std::to_string(seed));
    fake::reset(seed, fake::Host::kMayNotWait);
    fake::use_new_stream(fake::device(1));
    outcomes.expect_same(reduce_flat(fake::device(1)));
  }
}

}  // namespace
}  // namespace powersgd
