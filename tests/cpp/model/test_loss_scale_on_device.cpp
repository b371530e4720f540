// SPDX-License-Identifier: BSD-3-Clause
//
// A loss scale that only the device knows, in eager steps and in a captured step that is replayed,
// on a device that runs enqueued operations in any order that streams and events admit. The scales
// are powers of two, which change no rounding.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "fake_device/fake_device.h"
#include "group/sessions.h"
#include "model/device_outcomes.h"
#include "powersgd/group/stats.h"
#include "support/hook_defaults.h"
#include "support/random.h"

namespace powersgd {
namespace {

namespace fake = test::fake_device;

const std::vector<double> kScales = {1, 1, 4, 0.5, 0.5, 1024, 2};

// A model of three parameters in one bucket, whose gradients lie in the same memory in every step.
class ScaledModel {
 public:
  explicit ScaledModel(at::Device device)
      : session(test::session_of_equal_ranks(device, test::compressing(2))),
        model(test::attach(session, test::zeros({{24, 32}, {24}, {20, 36}}, device))),
        buffer(at::zeros({24 * 32 + 24 + 20 * 36}, device)) {}

  void put_gradient(size_t step, double scale, double factor = 1) {
    buffer.copy_(test::random(step, {buffer.numel()}) * scale * factor);
  }

  auto reduce() {
    const auto work = model->reduce(0, buffer, {0, 1, 2}, 2);
    model->end_step();
    return work;
  }

  const std::shared_ptr<Session> session;
  const std::shared_ptr<BucketReducer> model;
  at::Tensor buffer;
};

// Returns the outputs without loss scales.
std::vector<at::Tensor> unscaled_outputs(at::Device device) {
  ScaledModel plain(device);
  std::vector<at::Tensor> outputs;
  for (size_t step = 0; step < kScales.size(); ++step) {
    plain.put_gradient(step, 1);
    plain.reduce()->wait();
    outputs.push_back(plain.buffer.clone());
  }
  return outputs;
}

// A GradScaler changes its tensor in place, has another one after load_state_dict(), or has it on
// another device. A number comes from the host.
enum class Scaler { kInPlace, kReplaced, kElsewhere, kNumber };

std::string name_of_scaler(const testing::TestParamInfo<Scaler>& scaler) {
  static constexpr const char* kNames[] = {"InPlace", "Replaced", "Elsewhere", "Number"};
  return kNames[static_cast<int>(scaler.param)];
}

std::vector<at::Tensor> outputs_of_scaled(at::Device device, Scaler scaler) {
  ScaledModel scaled(device);
  at::Tensor scale = at::zeros({}, scaler == Scaler::kElsewhere ? fake::device(1) : device);
  if (scaler != Scaler::kNumber) scaled.model->states()->set_loss_scale(scale);
  std::vector<at::Tensor> outputs;
  for (size_t step = 0; step < kScales.size(); ++step) {
    scale.fill_(kScales[step]);
    if (scaler == Scaler::kNumber) scaled.model->states()->set_grad_scale(kScales[step]);
    scaled.put_gradient(step, kScales[step]);
    const auto work = scaled.reduce();
    if (scaler == Scaler::kReplaced) {
      scale = at::zeros({}, device);
      scaled.model->states()->set_loss_scale(scale);  // releases the one that the step reads
    }
    work->wait();
    outputs.push_back(scaled.buffer / kScales[step]);
  }
  fake::let_host_wait();
  for (at::Tensor& output : outputs) output = output.cpu();
  return outputs;
}

class LossScaleOnDevice : public testing::TestWithParam<Scaler> {};

TEST_P(LossScaleOnDevice, TakesResidualsAlongWithoutAWaitOfTheHost) {
  fake::add_operators();
  const std::vector<at::Tensor> expected = unscaled_outputs(at::kCPU);
  test::DeviceOutcomes outcomes(expected, 1e-4);
  test::in_any_order(fake::Host::kMayNotWait, [&] {
    fake::use_new_stream(fake::device(0));
    outcomes.expect_same(outputs_of_scaled(fake::device(0), GetParam()));
  });
}

INSTANTIATE_TEST_SUITE_P(Scalers, LossScaleOnDevice,
                         testing::Values(Scaler::kInPlace, Scaler::kReplaced, Scaler::kElsewhere,
                                         Scaler::kNumber),
                         name_of_scaler);

TEST(LossScale, OnTheCpuIsReadWhenTheStepRuns) {
  const std::vector<at::Tensor> expected = unscaled_outputs(at::kCPU);
  const std::vector<at::Tensor> outputs = outputs_of_scaled(at::kCPU, Scaler::kInPlace);
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(at::equal(outputs[i], expected[i]));
}

TEST(LossScale, ThatIsANumberLeavesTheScalersOwnAlone) {
  ScaledModel model(at::kCPU);
  ModelStates& states = *model.model->states();
  const at::Tensor scalers = at::full({}, 8.0F);
  states.set_loss_scale(scalers);
  EXPECT_EQ(states.grad_scale(), 8);
  states.set_grad_scale(4);
  EXPECT_EQ(states.grad_scale(), 4);
  EXPECT_EQ(scalers.item<double>(), 8);
  EXPECT_THROW(states.set_loss_scale(at::ones({2})), c10::ValueError);
  EXPECT_THROW(states.set_loss_scale(at::ones({}, at::kDouble)), c10::ValueError);
}

// As a CUDA graph: the replayed operations are those of one step, to the last argument.
class ReplayedLossScale : public testing::TestWithParam<Scaler> {};

TEST_P(ReplayedLossScale, IsThePresentOne) {
  fake::add_operators();
  fake::reset(1, fake::Host::kMayNotWait);
  const at::Device device = fake::device(0);
  ScaledModel eager(device), replayed(device);
  const at::Tensor scale = at::zeros({}, device);
  const bool is_number = GetParam() == Scaler::kNumber;
  if (!is_number) replayed.model->states()->set_loss_scale(scale);
  std::vector<at::Tensor> expected, outputs;
  constexpr size_t kCaptured = 2, kFirstBad = 4, kLastBad = 5;
  for (size_t step = 0; step < 9; ++step) {
    const bool bad = step >= kFirstBad && step <= kLastBad;
    const double factor = bad ? std::numeric_limits<double>::infinity() : 1;
    eager.put_gradient(step, 1, factor);
    eager.reduce()->wait();
    expected.push_back(eager.buffer.clone());
    const double of_step = kScales[step % kScales.size()];
    scale.fill_(of_step);
    if (is_number) replayed.model->states()->set_grad_scale(of_step);
    replayed.put_gradient(step, of_step, factor);
    const bool is_last = step == 8;  // an eager step after the replays
    if (step == kCaptured) fake::begin_capture(device);
    if (step <= kCaptured || is_last) {
      replayed.reduce()->wait();
    } else {
      fake::replay(device);
    }
    if (step == kCaptured) {
      fake::end_capture();
      fake::run();
    }
    outputs.push_back(replayed.buffer / of_step);
  }
  fake::let_host_wait();
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(at::allclose(outputs[i].cpu(), expected[i].cpu(), 0, 0, /*equal_nan=*/true))
        << "step " << i;
  }
  EXPECT_EQ(replayed.session->snapshot().skipped_steps, 2);
}

INSTANTIATE_TEST_SUITE_P(Scalers, ReplayedLossScale,
                         testing::Values(Scaler::kInPlace, Scaler::kNumber), name_of_scaler);

TEST(LossScale, ABucketThatIsNewCannotBeCaptured) {
  fake::add_operators();
  fake::reset(1, fake::Host::kMayNotWait);
  const at::Device device = fake::device(0);
  ScaledModel model(device);
  fake::begin_capture(device);
  EXPECT_THROW(model.reduce()->wait(), c10::Error);
  fake::end_capture();
  model.reduce()->wait();
}

}  // namespace
}  // namespace powersgd
