// SPDX-License-Identifier: BSD-3-Clause
//
// An attached model in a group that is ordered by streams, on a device that runs what is enqueued
// in any order which streams and events admit: it must have the bits of a model on the CPU.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "backend/attached_model.h"
#include "backend/stats.h"
#include "support/fake_device.h"
#include "support/two_equal_ranks.h"

namespace powersgd {
namespace {

namespace fake = test::fake_device;

constexpr int64_t kNumel = 24 * 32 + 24 + 32 * 54;  // of the model below
const std::vector<std::string> kNames = {"weight", "bias", "conv"};

c10::intrusive_ptr<BackendPowerSGD> make_backend(at::Device device, const Options& options) {
  InnerAndLanes inner{device.type(), c10::make_intrusive<test::StreamBackend>(), {}};
  if (device.is_cpu()) {
    inner.inner = c10::make_intrusive<test::HostBackend>();
    inner.lanes = {inner.inner, inner.inner};
  }
  return c10::make_intrusive<BackendPowerSGD>(0, 2, std::vector{inner}, options);
}

std::vector<at::Tensor> make_parameters(at::Device device) {
  return {at::zeros({24, 32}, device), at::zeros({24}, device), at::zeros({32, 54}, device)};
}

at::Tensor gradient(uint64_t step) {
  return at::randn({kNumel}, at::detail::createCPUGenerator(step));
}

struct Outcome {
  std::vector<at::Tensor> tensors;  // outputs of all steps, then states
  int64_t skipped;
};

// Steps of all kinds, a checkpoint of each kind, and steps of the models that were loaded.
Outcome train(at::Device device, const Options& options) {
  const auto backend = make_backend(device, options);
  const auto parameters = make_parameters(device);
  Outcome outcome;
  const auto step = [&](AttachedModel& model, const at::Tensor& gradient) {
    at::Tensor buffer = gradient.to(device, /*non_blocking=*/false, /*copy=*/true);
    model.reduce(0, buffer, model.find(parameters), 2)->wait();
    model.end_step();
    outcome.tensors.push_back(buffer.clone());
  };
  const auto model = std::make_shared<AttachedModel>(backend, kNames, parameters, options);
  step(*model, gradient(0));
  step(*model, gradient(1));
  model->step_skipped(at::ones({}, device));
  step(*model, gradient(2));
  model->step_skipped(at::zeros({}, device));  // it was not
  at::Tensor bad = gradient(3);
  bad[5] = std::numeric_limits<float>::infinity();
  step(*model, bad);
  step(*model, gradient(4));

  // What is exported is read by the caller's stream and then released.
  const auto resumed = std::make_shared<AttachedModel>(backend, kNames, parameters, options);
  {
    const auto of_all = model->export_state();
    for (const auto& saved : of_all) {
      for (const at::Tensor& tensor : {saved.residual, saved.q, saved.p}) {
        if (tensor.defined()) outcome.tensors.push_back(tensor.clone());
      }
    }
    resumed->load_state(of_all, model->step(), 1);
  }
  step(*resumed, gradient(5));
  const auto continued = std::make_shared<AttachedModel>(backend, kNames, parameters, options);
  continued->load_local(model->export_local(), model->step());
  step(*continued, gradient(5));
  step(*model, gradient(5));

  outcome.skipped = backend->snapshot().skipped_steps;
  for (at::Tensor& tensor : outcome.tensors) tensor = tensor.cpu();
  return outcome;
}

class AttachedModelOnDevice : public testing::TestWithParam<bool> {};

TEST_P(AttachedModelOnDevice, HasTheBitsOfTheHostInAnyOrderOfStreams) {
  fake::add_operators();
  Options options;
  options.matrix_approximation_rank = 2;
  options.start_powerSGD_iter = 0;
  options.alternating = GetParam();
  const Outcome expected = train(at::kCPU, options);
  EXPECT_EQ(expected.skipped, 1);
  for (unsigned seed = 0; seed < 20; ++seed) {
    fake::reset(seed, fake::Host::kMayWait);  // checkpoints do
    fake::use_new_stream(fake::device(0));
    const Outcome outcome = train(fake::device(0), options);
    EXPECT_EQ(outcome.skipped, expected.skipped);
    ASSERT_EQ(outcome.tensors.size(), expected.tensors.size());
    for (size_t i = 0; i < outcome.tensors.size(); ++i) {
      EXPECT_TRUE(at::allclose(outcome.tensors[i], expected.tensors[i], 0, 0, /*equal_nan=*/true))
          << "tensor " << i << ", order " << seed;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Modes, AttachedModelOnDevice, testing::Bool(),
                         [](const auto& mode) { return mode.param ? "Alternating" : "Plain"; });

}  // namespace
}  // namespace powersgd
