// SPDX-License-Identifier: BSD-3-Clause
//
// Steps that a graph holds, on the fake device, which overwrites released memory: a replay gives
// what a new step would, whatever has been reduced in between.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "fake_device/fake_device.h"
#include "gradients/capture_watch.h"
#include "gradients/flat_tensors.h"
#include "gradients/session_of_equal_ranks.h"
#include "powersgd/bucket_reducer.h"
#include "powersgd/scope_override.h"
#include "support/hook_defaults.h"

namespace powersgd {
namespace {

namespace fake = test::fake_device;

// A gradient on the device, at a fixed address.
class Gradient {
 public:
  explicit Gradient(int64_t numel)
      : memory_(static_cast<size_t>(numel)), tensor_(fake::tensor(fake::device(0), memory_)) {}

  at::Tensor& filled(uint64_t seed) {
    const at::Tensor values = at::randn({tensor_.numel()}, at::detail::createCPUGenerator(seed));
    fake::enqueue(fake::device(0), [this, values] {
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

using Reduce = std::function<void(at::Tensor&)>;

// Returns the output of a third step: of a new one, or if `between` is given of a replay of the
// second one after it.
at::Tensor third_output(const Reduce& reduce, int64_t numel, const std::function<void()>& between) {
  Gradient gradient(numel);
  reduce(gradient.filled(1));
  gradient.read();
  if (between) fake::begin_capture(fake::device(0));
  reduce(gradient.filled(2));
  if (between) fake::end_capture();
  gradient.read();
  if (between) {
    between();
    fake::run();
    fake::replay(fake::device(0));
    gradient.read();
  } else {
    reduce(gradient.filled(2));
  }
  return gradient.read();
}

void expect_same_output(const at::Tensor& expected, const at::Tensor& replayed) {
  EXPECT_TRUE(expected.isfinite().all().item<bool>());
  EXPECT_TRUE(at::equal(expected, replayed)) << "a released memory was read, or a state was lost";
}

class CapturedSteps : public testing::TestWithParam<std::optional<WireDType>> {
 protected:
  CapturedSteps() {
    fake::add_operators();
    fake::reset(0, fake::Host::kMayWait);  // which only a captured step may not
  }

  // Statistics are logged and replicas compared at every step.
  static Options make_options(Scope scope) {
    Options options = test::hook_defaults();
    options.scope = scope;
    options.matrix_approximation_rank = 2;
    options.start_powerSGD_iter = 0;
    options.min_numel = 1000;
    options.wire_dtype = GetParam();
    options.compression_stats_logging_frequency = 1;
    options.check_every = 1;
    return options;
  }

  // A model of one matrix, and its step.
  static std::pair<std::shared_ptr<BucketReducer>, Reduce> attach_one() {
    const c10::Device device = fake::device(0);
    const Options options = make_options(Scope::kBackward);
    auto model = BucketReducer::attach(test::make_session_of_equal_ranks(device, options), {"one"},
                                       {at::zeros({24, 32}, device)}, options);
    return {model, [model](at::Tensor& tensor) {
              model->reduce(0, tensor, {0}, 2)->wait();
              model->end_step();
            }};
  }
};

INSTANTIATE_TEST_SUITE_P(Wires, CapturedSteps, testing::Values(std::nullopt, WireDType::kInt8),
                         [](const auto& wire) {
                           return wire.param ? to_string(*wire.param) : "as_it_is";
                         });

TEST_P(CapturedSteps, OfAFlatTensorThatIsNotReducedForLong) {
  const auto output = [](bool replayed) {
    FlatTensors flat(
        test::make_session_of_equal_ranks(fake::device(0), make_options(Scope::kBackward)));
    const Reduce reduce = [&](at::Tensor& tensor) {
      push_override(true);  // a block is a pass
      flat.reduce({tensor}, {})->wait();
      pop_override();
    };
    const auto other_passes = [&] {
      Gradient other(3000);
      for (uint64_t pass = 0; pass < 102; ++pass) {
        reduce(other.filled(pass));
        fake::run();
      }
    };
    return third_output(reduce, 2517, replayed ? other_passes : std::function<void()>());
  };
  expect_same_output(output(false), output(true));
}

TEST_P(CapturedSteps, OfAFlatTensorWithoutState) {
  const auto output = [](bool replayed) {
    FlatTensors flat(
        test::make_session_of_equal_ranks(fake::device(0), make_options(Scope::kAlways)));
    const Reduce reduce = [&](at::Tensor& tensor) { flat.reduce({tensor}, {})->wait(); };
    const auto other_shapes = [&] {
      for (int64_t numel = 1000; numel < 1000 + 65 * 50; numel += 50) {
        Gradient other(numel);
        reduce(other.filled(0));
        fake::run();
      }
    };
    return third_output(reduce, 777 * 5, replayed ? other_shapes : std::function<void()>());
  };
  expect_same_output(output(false), output(true));
}

// The side streams may wait for nothing outside of the graph, and all of a pass is joined.
TEST_P(CapturedSteps, OfAPipelineOfBuckets) {
  const auto output = [](bool replayed) {
    const c10::Device device = fake::device(0);
    const Options options = make_options(Scope::kBackward);
    const std::vector<at::Tensor> parameters = {
        at::zeros({24, 32}, device), at::zeros({24, 32}, device), at::zeros({24, 32}, device)};
    const auto model = BucketReducer::attach(test::make_session_of_equal_ranks(device, options),
                                             {"one", "two", "three"}, parameters, options);
    const at::Tensor dropped = at::zeros({}, device);  // as a GradScaler says on the device
    const Reduce reduce = [&](at::Tensor& tensor) {
      std::vector<c10::intrusive_ptr<c10d::Work>> works;
      for (size_t bucket = 0; bucket < 3; ++bucket) {
        at::Tensor part = tensor.narrow(0, static_cast<int64_t>(bucket) * 24 * 32, 24 * 32);
        works.push_back(model->reduce(bucket, part, {bucket}, 2, /*more_follow=*/true));
      }
      model->end_step();
      for (const auto& work : works) work->wait();
      model->states()->step_skipped(dropped);
    };
    return third_output(reduce, 3 * 24 * 32, replayed ? std::function<void()>([] {}) : nullptr);
  };
  expect_same_output(output(false), output(true));
}

TEST_P(CapturedSteps, AreDiscardedAsOthersAre) {
  const auto output = [](bool replayed) {
    const c10::Device device = fake::device(0);
    Options options = make_options(Scope::kBackward);
    options.allow_discard = true;
    const std::vector<at::Tensor> parameters = {at::zeros({24, 32}, device)};
    const auto model = BucketReducer::attach(test::make_session_of_equal_ranks(device, options),
                                             {"one"}, parameters, options);
    const Reduce reduce = [&](at::Tensor& tensor) {
      model->reduce(0, tensor, {0}, 2)->wait();
      model->end_step();
      if (!replayed && model->states()->step() == 2) model->states()->discard_step();
    };
    const auto discard = [&] {
      // The host does not see replays, so that it may be called for each.
      model->states()->discard_step();
      model->states()->discard_step();
    };
    return third_output(reduce, 24 * 32, replayed ? discard : std::function<void()>());
  };
  expect_same_output(output(false), output(true));
}

TEST_P(CapturedSteps, OfABucketThatHasBeenRebuilt) {
  const auto output = [](bool replayed) {
    const c10::Device device = fake::device(0);
    const Options options = make_options(Scope::kBackward);
    const std::vector<at::Tensor> parameters = {at::zeros({24, 32}, device),
                                                at::zeros({40, 30}, device)};
    const auto model = BucketReducer::attach(test::make_session_of_equal_ranks(device, options),
                                             {"one", "two"}, parameters, options);
    const Reduce reduce = [&](at::Tensor& tensor) {
      model->reduce(0, tensor, {0}, 2)->wait();
      model->end_step();
    };
    const auto rebuild = [&] {
      Gradient other(40 * 30);
      model->reduce(0, other.filled(0), {1}, 2)->wait();
      model->end_step();
      fake::run();
    };
    return third_output(reduce, 24 * 32, replayed ? rebuild : std::function<void()>());
  };
  expect_same_output(output(false), output(true));
}

TEST_P(CapturedSteps, OfAModelThatHasBeenDetached) {
  const auto output = [](bool replayed) {
    const auto [model, reduce] = attach_one();
    const auto detach = [model = model] { model->detach(); };
    return third_output(reduce, 24 * 32, replayed ? detach : std::function<void()>());
  };
  expect_same_output(output(false), output(true));
}

// The look that the step before has started is read later.
TEST_P(CapturedSteps, ThatFollowALookAtTheResiduals) {
  const auto output = [](bool replayed) {
    const auto [model, reduce] = attach_one();
    Gradient gradient(24 * 32);
    for (uint64_t step = 1; step < CaptureWatch::kInterval; ++step) reduce(gradient.filled(step));
    return third_output(reduce, 24 * 32, replayed ? std::function<void()>([] {}) : nullptr);
  };
  expect_same_output(output(false), output(true));
}

// A replay would add it again.
TEST_P(CapturedSteps, LeaveALoadedResidualToTheNextStep) {
  const c10::Device device = fake::device(0);
  Options options = make_options(Scope::kBackward);
  const auto model =
      BucketReducer::attach(test::make_session_of_equal_ranks(device, options), {"weight", "bias"},
                            {at::zeros({24, 32}, device), at::zeros({8}, device)}, options);
  Gradient gradient(24 * 32 + 8);
  const auto bias_after_step = [&] {
    at::Tensor& tensor = gradient.filled(1);
    model->reduce(0, tensor, {0, 1}, 2)->wait();
    model->end_step();
    return [&] { return gradient.read().narrow(0, 24 * 32, 8); };
  };
  const at::Tensor exact = bias_after_step()();
  model->states()->load_state({{"bias", at::ones({8}), at::zeros({1, 8})}}, model->states()->step(),
                              1);
  fake::begin_capture(device);
  const auto bias = bias_after_step();
  fake::end_capture();
  EXPECT_TRUE(at::equal(bias(), exact));
  fake::replay(device);
  EXPECT_TRUE(at::equal(bias(), exact));
  EXPECT_TRUE(at::equal(bias_after_step()(), exact + 1));
  EXPECT_TRUE(at::equal(bias_after_step()(), exact));
}

}  // namespace
}  // namespace powersgd
