// SPDX-License-Identifier: BSD-3-Clause
//
// Compression on a device that runs enqueued operations in any order that streams and events admit.
#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "fake_device/fake_device.h"
#include "group/flat_tensors.h"
#include "group/sessions.h"
#include "model/device_outcomes.h"
#include "model/scope_block.h"
#include "powersgd/group/stats.h"
#include "support/hook_defaults.h"
#include "support/random.h"

namespace powersgd {
namespace {

namespace fake = test::fake_device;

// An attached model.

// The devices of the model's first layer and of its second.
struct Place {
  at::Device first, second;
};
// The embedding is tall enough for a CUDA kernel to share its rows between blocks.
constexpr int64_t kTall = 1030, kOfFirst = 24 * 32 + 24, kOfSecond = kTall * 33;  // elements

at::Tensor gradient(uint64_t step) { return test::random(step, {kOfFirst + kOfSecond}); }

struct Outcome {
  std::vector<at::Tensor> tensors;  // outputs of all steps, then states
  int64_t failed = 0, skipped = 0, differences = 0;
};

// Takes steps of all kinds, makes a checkpoint of each kind, and trains the loaded models.
Outcome train(const Place& place, const Options& options, bool blocks = false) {
  const auto session = test::session_of_equal_ranks(place.first, options, {}, blocks);
  const std::vector<at::Tensor> parameters = {at::zeros({24, 32}, place.first),
                                              at::zeros({24}, place.first),
                                              at::zeros({kTall, 33}, place.second)};
  Outcome outcome;
  const auto step = [&](BucketReducer& model, const at::Tensor& gradient,
                        Use use_of_weight = Use::kUsed, Use use_of_embedding = Use::kUsed) {
    at::Tensor first = gradient.narrow(0, 0, kOfFirst).to(place.first, false, /*copy=*/true);
    at::Tensor second =
        gradient.narrow(0, kOfFirst, kOfSecond).to(place.second, false, /*copy=*/true);
    const auto one =
        model.reduce(0, first, {0, 1}, 2, /*more_follow=*/true, {use_of_weight, Use::kUsed});
    const auto two = model.reduce(1, second, {2}, 2, /*more_follow=*/true, {use_of_embedding});
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
  const auto model = test::attach(session, parameters);
  step(*model, gradient(0));
  step(*model, gradient(1));
  model->states()->step_skipped(at::ones({}, place.first));
  step(*model, gradient(2));
  model->states()->step_skipped(at::zeros({}, place.first));  // the step was not skipped
  at::Tensor bad = gradient(3);
  bad[5] = std::numeric_limits<float>::infinity();
  step(*model, bad);
  for (const std::string stage : {"project", "reduce_p", "orthogonalize", "reconstruct"}) {
    session->set_stage_probe([&stage](const std::string& entered, int64_t) {
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
  const auto resumed = test::attach(session, parameters);
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
  const auto continued = test::attach(session, parameters);
  continued->states()->load_local(model->states()->export_local(), model->states()->step());
  step(*continued, gradient(5));
  step(*model, gradient(5));

  // The group ends, with a step that has not.
  at::Tensor broken_off = gradient(9).narrow(0, 0, kOfFirst).to(place.first, false, /*copy=*/true);
  const auto unfinished = model->reduce(0, broken_off, {0, 1}, 2);
  const auto other = test::session_of_equal_ranks(place.first, options, {}, blocks);
  const auto moved = test::attach(other, parameters, model.get());
  moved->states()->agree_with(0, model->states()->step() + 3);
  moved->states()->discard_step();
  model->detach();
  const int64_t steps = model->snapshot().steps;
  step(*moved, gradient(10));
  EXPECT_EQ(moved->snapshot().steps, steps + 1);

  const StatsSnapshot stats = session->snapshot();
  outcome.skipped = stats.skipped_steps;
  outcome.differences = stats.differences;
  for (at::Tensor& tensor : outcome.tensors) tensor = tensor.cpu();
  return outcome;
}

struct Mode {
  const char* name;
  std::optional<WireDType> wire;
  // The model is spread over two devices, and its replicas are compared, for which alone a step
  // waits for the device.
  bool spread = false;
  // Of other kernels than the CPU's. An element may be rounded to the other of two values.
  double tolerance = 1e-4;
  bool blocks = false;  // the backend, as Gloo does, and so the session's steps may
};

class ModelOnDevice : public testing::TestWithParam<Mode> {};

TEST_P(ModelOnDevice, IsTheSameInAnyOrderOfStreams) {
  fake::add_operators();
  const Mode& mode = GetParam();
  Options options = test::compressing(2, mode.wire);
  options.check_every = mode.spread ? 3 : 0;
  options.allow_discard = true;
  const Outcome expected = train({at::kCPU, at::kCPU}, options);
  EXPECT_EQ(expected.skipped, 1);
  EXPECT_EQ(expected.differences, 0);
  EXPECT_EQ(expected.failed, 8);
  test::DeviceOutcomes outcomes(expected.tensors, mode.tolerance);
  const bool may_wait = mode.spread || mode.blocks;
  test::in_any_order(may_wait ? fake::Host::kMayWait : fake::Host::kMayNotWait, [&] {
    fake::use_new_stream(fake::device(0));
    fake::use_new_stream(fake::device(1));
    const Place place{fake::device(0), fake::device(mode.spread ? 1 : 0)};
    const Outcome outcome = train(place, options, mode.blocks);
    EXPECT_EQ(outcome.skipped, expected.skipped);
    EXPECT_EQ(outcome.differences, expected.differences);
    EXPECT_EQ(outcome.failed, expected.failed);
    outcomes.expect_same(outcome.tensors);
  });
}

INSTANTIATE_TEST_SUITE_P(
    Modes, ModelOnDevice,
    testing::Values(Mode{"as_it_is", std::nullopt}, Mode{"spread_and_checked", std::nullopt, true},
                    Mode{"bfloat16", WireDType::kBFloat16, false, 2e-2},
                    Mode{"int8", WireDType::kInt8, false, 2e-2},
                    Mode{"int8_over_gloo", WireDType::kInt8, true, 2e-2, true}),
    [](const auto& mode) { return mode.param.name; });

TEST(StageProbeOnDevice, IsCalledInTheStreamOfWhatFollows) {
  fake::add_operators();
  test::in_any_order(fake::Host::kMayNotWait, [&] {
    const at::Device device = fake::device(0);
    fake::use_new_stream(device);
    const auto session = test::session_of_equal_ranks(device, test::compressing(2));
    const auto model = test::attach(session, {at::zeros({24, 32}, device)});
    const auto current = [&] {
      return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
    };
    std::vector<std::string> reached;
    std::vector<c10::Stream> streams;
    session->set_stage_probe([&](const char* point, int64_t bucket) {
      reached.push_back(std::string(point) + " " + std::to_string(bucket));
      streams.push_back(current());
    });
    at::Tensor gradient = test::random(1, {24 * 32}).to(device);
    model->reduce(0, gradient, {0}, 2, /*more_follow=*/true)->wait();
    session->set_stage_probe({});
    model->end_step();
    EXPECT_EQ(reached,
              (std::vector<std::string>{
                  "ready 0", "project 0", "reduce_p 0", "collective 0", "collective_end 0",
                  "received 0", "orthogonalize 0", "back_project 0", "reduce_q 0", "collective 0",
                  "collective_end 0", "received 0", "reconstruct 0", "end 0"}));
    const c10::Stream ahead = streams[1], behind = streams.back();
    EXPECT_EQ(streams[0], current());
    EXPECT_NE(ahead, behind);
    for (size_t i = 1; i < streams.size(); ++i) EXPECT_EQ(streams[i], i < 5 ? ahead : behind) << i;
  });
}

// Tensors without an attached model.

std::vector<at::Tensor> reduce_flat(at::Device device) {
  Options options = test::compressing(1);
  options.min_numel = 1000;
  const auto session = test::session_of_equal_ranks(device, options);
  FlatTensors flat_tensors(session);
  std::vector<at::Tensor> outputs;
  for (uint64_t step = 0; step < 4; ++step) {
    const test::ScopeBlock pass(true);
    for (const int64_t numel : {2500, 3000, 2500}) {
      std::vector<at::Tensor> tensors = {test::random(step, {numel}).to(device)};
      const auto work = flat_tensors.reduce(tensors, {});
      EXPECT_TRUE(work);
      work->wait();
      outputs.push_back(tensors[0].clone());
    }
  }
  fake::let_host_wait();
  EXPECT_EQ(session->snapshot().compressed_calls, 3 * 4);
  for (at::Tensor& output : outputs) output = output.cpu();
  return outputs;
}

TEST(FlatTensorsOnDevice, AreTheSameInAnyOrderOfStreams) {
  fake::add_operators();
  test::DeviceOutcomes outcomes(reduce_flat(at::kCPU), 1e-4);
  test::in_any_order(fake::Host::kMayNotWait, [&] {
    fake::use_new_stream(fake::device(1));
    outcomes.expect_same(reduce_flat(fake::device(1)));
  });
}

}  // namespace
}  // namespace powersgd
