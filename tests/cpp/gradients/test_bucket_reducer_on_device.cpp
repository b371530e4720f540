// SPDX-License-Identifier: BSD-3-Clause
//
// An attached model in a group that is ordered by streams, on a device that runs enqueued
// operations in any order that streams and events admit.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

#include <limits>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "fake_device/fake_device.h"
#include "gradients/device_outcomes.h"
#include "gradients/session_of_equal_ranks.h"
#include "powersgd/bucket_reducer.h"
#include "powersgd/stats.h"
#include "support/hook_defaults.h"

namespace powersgd {
namespace {

namespace fake = test::fake_device;

// The devices of the model's first layer and of its second.
struct Place {
  at::Device first, second;
};
// The embedding is tall enough for a CUDA kernel to share its rows between blocks.
constexpr int64_t kRows = 1030, kFirst = 24 * 32 + 24, kSecond = kRows * 33;  // elements
const std::vector<std::string> kNames = {"weight", "bias", "embedding"};

std::vector<at::Tensor> make_parameters(const Place& place) {
  return {at::zeros({24, 32}, place.first), at::zeros({24}, place.first),
          at::zeros({kRows, 33}, place.second)};
}

at::Tensor gradient(uint64_t step) {
  return at::randn({kFirst + kSecond}, at::detail::createCPUGenerator(step));
}

struct Outcome {
  std::vector<at::Tensor> tensors;  // outputs of all steps, then states
  int64_t failed = 0, skipped = 0, differences = 0;
};

// Takes steps of all kinds, makes a checkpoint of each kind, and trains the loaded models.
Outcome train(const Place& place, const Options& options) {
  const auto session = test::make_session_of_equal_ranks(place.first, options);
  const auto parameters = make_parameters(place);
  Outcome outcome;
  const auto step = [&](BucketReducer& model, const at::Tensor& gradient,
                        Use use_of_weight = Use::kUsed, Use use_of_embedding = Use::kUsed) {
    at::Tensor first = gradient.narrow(0, 0, kFirst).to(place.first, false, /*copy=*/true);
    at::Tensor second = gradient.narrow(0, kFirst, kSecond).to(place.second, false, /*copy=*/true);
    const auto one =
        model.reduce(0, first, model.states()->parameters().find({parameters[0], parameters[1]}), 2,
                     /*more_follow=*/true, {use_of_weight, Use::kUsed});
    const auto two = model.reduce(1, second, model.states()->parameters().find({parameters[2]}), 2,
                                  /*more_follow=*/true, {use_of_embedding});
    model.end_step();
    for (const auto& work : {one, two}) {
      try {
        work->wait();
      } catch (const std::runtime_error&) {
        ++outcome.failed;
      }
    }
    for (const at::Tensor& output : {first, second}) outcome.tensors.push_back(output.clone());
  };
  const auto model = BucketReducer::attach(session, kNames, parameters, options);
  step(*model, gradient(0));
  step(*model, gradient(1));
  model->states()->step_skipped(at::ones({}, place.first));
  step(*model, gradient(2));
  model->states()->step_skipped(at::zeros({}, place.first));  // the step was not skipped
  at::Tensor bad = gradient(3);
  bad[5] = std::numeric_limits<float>::infinity();
  step(*model, bad);
  for (const std::string stage : {"project", "reduce_p", "orthogonalize", "reconstruct"}) {
    session->set_stage_probe([&stage](const std::string& entered) {
      if (entered == stage) throw std::runtime_error("injected failure");
    });
    step(*model, gradient(4));
    session->set_stage_probe(nullptr);
    step(*model, gradient(5));
  }
  step(*model, gradient(4));
  step(*model, gradient(6), Use::kUsed, Use::kStale);
  step(*model, 1e4 * gradient(7), Use::kStale);
  model->states()->discard_step();
  step(*model, gradient(8));

  fake::let_host_wait();  // a checkpoint waits
  // The caller's stream reads an exported tensor, which is then released.
  const auto resumed = BucketReducer::attach(session, kNames, parameters, options);
  {
    const auto of_all = model->states()->export_state();
    resumed->states()->load_state(of_all, model->states()->step(), 1);
    for (const auto& saved : of_all) {
      for (const at::Tensor& tensor : {saved.residual, saved.q}) {
        if (tensor.defined()) outcome.tensors.push_back(tensor.clone());
      }
    }
  }
  step(*resumed, gradient(5));
  const auto continued = BucketReducer::attach(session, kNames, parameters, options);
  continued->states()->load_local(model->states()->export_local(), model->states()->step());
  step(*continued, gradient(5));
  step(*model, gradient(5));

  const StatsSnapshot stats = session->snapshot();
  outcome.skipped = stats.skipped_steps;
  outcome.differences = stats.differences;
  for (at::Tensor& tensor : outcome.tensors) tensor = tensor.cpu();
  return outcome;
}

// true: spread over two devices, with checks, for which alone a step waits for the device
class BucketReducerOnDevice : public testing::TestWithParam<bool> {};

TEST_P(BucketReducerOnDevice, IsTheSameInAnyOrderOfStreams) {
  fake::add_operators();
  const bool spread = GetParam();
  Options options = test::hook_defaults();
  options.matrix_approximation_rank = 2;
  options.start_powerSGD_iter = 0;
  options.check_every = spread ? 3 : 0;
  options.allow_discard = true;
  const Outcome expected = train({at::kCPU, at::kCPU}, options);
  EXPECT_EQ(expected.skipped, 1);
  EXPECT_EQ(expected.differences, 0);
  EXPECT_EQ(expected.failed, 8);
  test::DeviceOutcomes outcomes(expected.tensors, 1e-4);
  for (unsigned seed = 0; seed < 20; ++seed) {
    SCOPED_TRACE("order " + std::to_string(seed));
    fake::reset(seed, spread ? fake::Host::kMayWait : fake::Host::kMayNotWait);
    fake::use_new_stream(fake::device(0));
    fake::use_new_stream(fake::device(1));
    const Outcome outcome = train({fake::device(0), fake::device(spread ? 1 : 0)}, options);
    EXPECT_EQ(outcome.skipped, expected.skipped);
    EXPECT_EQ(outcome.differences, expected.differences);
    EXPECT_EQ(outcome.failed, expected.failed);
    outcomes.expect_same(outcome.tensors);
  }
}

INSTANTIATE_TEST_SUITE_P(Modes, BucketReducerOnDevice, testing::Bool(), [](const auto& mode) {
  return mode.param ? "SpreadAndChecked" : "Plain";
});

}  // namespace
}  // namespace powersgd
