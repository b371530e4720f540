// SPDX-License-Identifier: BSD-3-Clause
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

#include "powersgd/bucket_reducer.h"
#include "powersgd/stats.h"
#include "ranks/thread_ranks.h"
#include "support/hook_defaults.h"

namespace powersgd {
namespace {

constexpr int kRanks = 2;

Options make_options(int64_t start = 0) {
  Options options = test::hook_defaults();
  options.matrix_approximation_rank = 2;
  options.start_powerSGD_iter = start;
  return options;
}

at::Tensor noise(int seed, int64_t numel) {
  return at::randn({numel}, at::detail::createCPUGenerator(static_cast<uint64_t>(seed)));
}

// A weight, a bias and a channels_last weight. They are reduced as in DDP, in one bucket or in two.
class Model {
 public:
  Model(int rank, const std::shared_ptr<Session>& session, const Options& options) : rank_(rank) {
    parameters = {at::zeros({24, 32}), at::zeros({24}),
                  at::zeros({32, 6, 3, 3}).contiguous(at::MemoryFormat::ChannelsLast)};
    model = BucketReducer::attach(session, std::vector<std::string>{"weight", "bias", "conv"},
                                  parameters, options);
  }

  // Returns the averaged gradients of one step, in the order of the parameters.
  at::Tensor step(int number, bool two_buckets, at::ScalarType dtype = at::kFloat) {
    const at::Tensor all = noise(number * kRanks + rank_, 24 * 32 + 24 + 32 * 54).to(dtype);
    if (!two_buckets) {
      reduce(0, 1, all, {0, 1, 2});
    } else {
      reduce(0, 2, all.narrow(0, 0, 24 * 32 + 24), {0, 1});
      reduce(1, 2, all.narrow(0, 24 * 32 + 24, 32 * 54), {2});
    }
    return all;
  }

  static at::Tensor mean_gradient(int number) {
    const int64_t numel = 24 * 32 + 24 + 32 * 54;
    return (noise(number * kRanks, numel) + noise(number * kRanks + 1, numel)) / kRanks;
  }

  std::vector<at::Tensor> parameters;
  std::shared_ptr<BucketReducer> model;

 private:
  void reduce(size_t index, size_t count, at::Tensor buffer, const std::vector<size_t>& which) {
    std::vector<at::Tensor> members;
    for (const size_t i : which) members.push_back(parameters[i]);
    model->reduce(index, buffer, model->states()->parameters().find(members), kRanks)->wait();
    if (index + 1 == count) model->end_step();
  }

  const int rank_;
};

void run(const Options& options,
         const std::function<void(Model&, const std::shared_ptr<Session>&)>& fn) {
  const test::Channels channels(kRanks);
  test::run_ranks(kRanks, [&](int rank, const auto& inner) {
    std::vector<InnerAndChannels> inners = {{c10::DeviceType::CPU, inner, channels.of(rank), {}}};
    const auto session =
        std::make_shared<Session>(rank, kRanks, std::move(inners), options, LogSink());
    Model model(rank, session, options);
    try {
      fn(model, session);
    } catch (...) {
      channels.kill(rank);
      throw;
    }
  });
}

// In the order of a bucket's memory.
at::Tensor flat(const Model& model, const std::vector<ParameterExport>& state) {
  std::vector<at::Tensor> parts;
  for (size_t i = 0; i < state.size(); ++i) {
    const at::Tensor& residual = state[i].residual;
    if (!residual.defined()) {
      parts.push_back(at::zeros({model.parameters[i].numel()}));
    } else if (residual.dim() == 4) {
      parts.push_back(residual.permute({0, 2, 3, 1}).flatten());
    } else {
      parts.push_back(residual.flatten());
    }
  }
  return at::cat(parts);
}

double relative(const at::Tensor& a, const at::Tensor& b) {
  return ((a - b).norm() / b.norm()).item<double>();
}

TEST(BucketReducer, NothingIsLostWhenBucketsAreRebuilt) {
  run(make_options(), [](Model& model, const auto&) {
    at::Tensor sent = at::zeros({24 * 32 + 24 + 32 * 54}), asked = at::zeros_like(sent);
    for (int step = 0; step < 8; ++step) {
      sent += model.step(step, /*two_buckets=*/step >= 3);
      asked += Model::mean_gradient(step);
    }
    const at::Tensor left = flat(model, model.model->states()->export_state());
    EXPECT_GT(left.norm().item<double>(), 1);
    EXPECT_LT(relative(sent + left, asked), 1e-5);
    EXPECT_EQ(model.model->states()->step(), 8);
  });
}

// FSDP2 reduces in another dtype if its module is converted before its first pass.
TEST(BucketReducer, NothingIsLostWhenBucketsChangeTheirDtype) {
  run(make_options(), [](Model& model, const auto&) {
    at::Tensor sent = at::zeros({24 * 32 + 24 + 32 * 54}, at::kDouble);
    at::Tensor asked = at::zeros_like(sent);
    for (int step = 0; step < 9; ++step) {
      sent += model.step(step, /*two_buckets=*/false, step / 3 == 1 ? at::kDouble : at::kFloat);
      asked += Model::mean_gradient(step);
    }
    const at::Tensor left = flat(model, model.model->states()->export_state());
    EXPECT_GT(left.norm().item<double>(), 1);
    EXPECT_LT(relative(sent + left, asked), 1e-5);
  });
}

TEST(BucketReducer, WarmUpIsExact) {
  run(make_options(/*start=*/2), [](Model& model, const auto& session) {
    EXPECT_TRUE(at::equal(model.step(0, false), Model::mean_gradient(0)));
    EXPECT_TRUE(at::equal(model.step(1, false), Model::mean_gradient(1)));
    EXPECT_FALSE(at::equal(model.step(2, false), Model::mean_gradient(2)));
    EXPECT_EQ(session->snapshot().exact_calls, 2);
    EXPECT_EQ(session->snapshot().compressed_calls, 1);
  });
}

TEST(BucketReducer, DetachedIsExact) {
  run(make_options(), [](Model& model, const auto&) {
    model.model->set_active(false);
    EXPECT_TRUE(at::equal(model.step(0, false), Model::mean_gradient(0)));
  });
}

TEST(BucketReducer, AStateThatIsLoadedIsTheOneThatWasSaved) {
  run(make_options(), [](Model& model, const auto& session) {
    for (int step = 0; step < 3; ++step) model.step(step, false);
    const auto saved = model.model->states()->export_state();
    Model other(0, session, make_options());
    other.model->states()->load_state(saved, 3, 1.0);
    EXPECT_EQ(other.model->states()->step(), 3);
    const auto loaded = other.model->states()->export_state();
    for (size_t i = 0; i < saved.size(); ++i) {
      ASSERT_EQ(loaded[i].residual.defined(), saved[i].residual.defined()) << saved[i].name;
      if (!saved[i].residual.defined()) continue;
      EXPECT_EQ(loaded[i].residual.sizes(), model.parameters[i].sizes());
      EXPECT_LT(relative(loaded[i].residual, saved[i].residual), 1e-6) << saved[i].name;
      EXPECT_TRUE(at::equal(loaded[i].q, saved[i].q)) << saved[i].name;
    }
  });
}

TEST(BucketReducer, AParameterThatWasNotAttachedIsAnError) {
  run(make_options(), [](Model& model, const auto&) {
    model.parameters[1] = at::zeros({24});
    EXPECT_THROW(model.step(0, false), c10::Error);
  });
}

}  // namespace
}  // namespace powersgd
