// SPDX-License-Identifier: BSD-3-Clause
//
// Steps that a graph holds, on the fake device, which overwrites released memory: a replay gives
// what a new step would, whatever has been reduced in between.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "fake_device/fake_device.h"
#include "group/flat_tensors.h"
#include "group/sessions.h"
#include "model/capture_watch.h"
#include "model/scope_block.h"
#include "support/hook_defaults.h"
#include "support/random.h"

namespace powersgd {
namespace {

namespace fake = test::fake_device;

// A gradient on the device, at a fixed address.
class Gradient {
 public:
  explicit Gradient(int64_t numel)
      : memory_(static_cast<size_t>(numel)), tensor_(fake::tensor(fake::device(0), memory_)) {}

  at::Tensor& filled(uint64_t seed) {
    fake::enqueue(fake::device(0), [this, values = test::random(seed, {tensor_.numel()})] {
      std::copy_n(values.const_data_ptr<float>(), memory_.size(), memory_.data());
    });
    return tensor_;
  }
  at::Tensor read() {
    fake::run();
    return at::tensor(memory_);
  }

 private:
  std::vector<float> memory_;
  at::Tensor tensor_;
};

// Steps of one gradient.
struct Steps {
  int64_t numel;
  std::function<void(at::Tensor&)> reduce;
  std::function<void()> before_replay = [] {};      // of the second step, as a third one
  std::function<void()> before_third_step = [] {};  // where the third one is no replay
};

at::Tensor third_output(const Steps& steps, bool replayed) {
  Gradient gradient(steps.numel);
  steps.reduce(gradient.filled(1));
  gradient.read();
  if (replayed) fake::begin_capture(fake::device(0));
  steps.reduce(gradient.filled(2));
  if (replayed) fake::end_capture();
  gradient.read();
  if (replayed) {
    steps.before_replay();
    fake::run();
    fake::replay(fake::device(0));
  } else {
    steps.before_third_step();
    steps.reduce(gradient.filled(2));
  }
  return gradient.read();
}

class CapturedSteps : public testing::TestWithParam<std::optional<WireDType>> {
 protected:
  CapturedSteps() {
    fake::add_operators();
    fake::reset(0, fake::Host::kMayWait);  // which only a captured step may not
    options_.min_numel = 1000;
    options_.compression_stats_logging_frequency = 1;
    options_.check_every = 1;
  }

  std::shared_ptr<Session> session() {
    return test::session_of_equal_ranks(fake::device(0), options_);
  }
  // A model of matrices, the first of which is the one bucket of a step.
  std::shared_ptr<BucketReducer> attach(const test::Shapes& shapes = {{24, 32}}) {
    return test::attach(session(), test::zeros(shapes, fake::device(0)));
  }
  static Steps steps_of(const std::shared_ptr<BucketReducer>& model) {
    return {24 * 32, [model](at::Tensor& tensor) {
              model->reduce(0, tensor, {0}, 2)->wait();
              model->end_step();
            }};
  }

  static void expect_that_a_replay_is_a_step(const std::function<Steps()>& begin) {
    const at::Tensor expected = third_output(begin(), /*replayed=*/false);
    EXPECT_TRUE(expected.isfinite().all().item<bool>());
    EXPECT_TRUE(at::equal(third_output(begin(), /*replayed=*/true), expected))
        << "a released memory was read, or a state was lost";
  }

  // Statistics are logged and replicas compared at every step.
  Options options_ = test::compressing(2, GetParam());
};

INSTANTIATE_TEST_SUITE_P(Wires, CapturedSteps, testing::Values(std::nullopt, WireDType::kInt8),
                         [](const auto& wire) { return test::name_of(wire.param); });

TEST_P(CapturedSteps, OfAFlatTensorThatIsNotReducedForLong) {
  expect_that_a_replay_is_a_step([&] {
    const auto reduce = [flat = std::make_shared<FlatTensors>(session())](at::Tensor& tensor) {
      const test::ScopeBlock pass(true);
      flat->reduce({tensor}, {})->wait();
    };
    return Steps{2517, reduce, /*before_replay=*/[reduce] {
                   Gradient other(3000);
                   for (uint64_t pass = 0; pass < 102; ++pass) {
                     reduce(other.filled(pass));
                     fake::run();
                   }
                 }};
  });
}

// The side streams may wait for nothing outside of the graph, and all of a pass is joined.
TEST_P(CapturedSteps, OfAPipelineOfBuckets) {
  expect_that_a_replay_is_a_step([&] {
    const auto model = attach({{24, 32}, {24, 32}, {24, 32}});
    const at::Tensor dropped = at::zeros({}, fake::device(0));  // as a GradScaler says there
    return Steps{
        3 * 24 * 32, [model, dropped](at::Tensor& tensor) {
          std::vector<c10::intrusive_ptr<c10d::Work>> works;
          for (size_t bucket = 0; bucket < 3; ++bucket) {
            at::Tensor part = tensor.view({3, -1})[static_cast<int64_t>(bucket)];
            works.push_back(model->reduce(bucket, part, {bucket}, 2, /*more_follow=*/true));
          }
          model->end_step();
          for (const auto& work : works) work->wait();
          model->states()->step_skipped(dropped);
        }};
  });
}

TEST_P(CapturedSteps, AreDiscardedAsOthersAre) {
  options_.allow_discard = true;
  expect_that_a_replay_is_a_step([&] {
    const auto model = attach();
    Steps steps = steps_of(model);
    steps.before_third_step = [model] { model->states()->discard_step(); };
    steps.before_replay = [model] {
      // The host does not see replays, so that it may be called for each.
      model->states()->discard_step();
      model->states()->discard_step();
    };
    return steps;
  });
}

TEST_P(CapturedSteps, OfABucketThatHasBeenRebuilt) {
  expect_that_a_replay_is_a_step([&] {
    const auto model = attach({{24, 32}, {40, 30}});
    Steps steps = steps_of(model);
    steps.before_replay = [model] {
      Gradient other(40 * 30);
      model->reduce(0, other.filled(0), {1}, 2)->wait();
      model->end_step();
      fake::run();
    };
    return steps;
  });
}

TEST_P(CapturedSteps, OfAModelThatHasBeenDetached) {
  expect_that_a_replay_is_a_step([&] {
    const auto model = attach();
    Steps steps = steps_of(model);
    steps.before_replay = [model] { model->detach(); };
    return steps;
  });
}

// The look that the step before has started is read later.
TEST_P(CapturedSteps, ThatFollowALookAtTheResiduals) {
  expect_that_a_replay_is_a_step([&] {
    const Steps steps = steps_of(attach());
    Gradient gradient(24 * 32);
    for (uint64_t i = 1; i < CaptureWatch::kInterval; ++i) steps.reduce(gradient.filled(i));
    fake::run();
    return steps;
  });
}

// A replay would add it again.
TEST_P(CapturedSteps, LeaveALoadedResidualToTheNextStep) {
  const auto model = attach({{24, 32}, {8}});
  Gradient gradient(24 * 32 + 8);
  const auto take_step = [&] {
    model->reduce(0, gradient.filled(1), {0, 1}, 2)->wait();
    model->end_step();
  };
  const auto bias = [&] { return gradient.read().narrow(0, 24 * 32, 8); };
  take_step();
  const at::Tensor exact = bias();
  model->states()->load_state({{"1", at::ones({8}), at::zeros({1, 8})}}, model->states()->step(),
                              1);
  fake::begin_capture(fake::device(0));
  take_step();
  fake::end_capture();
  EXPECT_TRUE(at::equal(bias(), exact));
  fake::replay(fake::device(0));
  EXPECT_TRUE(at::equal(bias(), exact));
  take_step();
  EXPECT_TRUE(at::equal(bias(), exact + 1));
  take_step();
  EXPECT_TRUE(at::equal(bias(), exact));
}

}  // namespace
}  // namespace powersgd
