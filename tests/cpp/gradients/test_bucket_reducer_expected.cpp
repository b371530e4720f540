// SPDX-License-Identifier: BSD-3-Clause
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

#include "powersgd/bucket_reducer.h"
#include "ranks/thread_ranks.h"
#include "support/hook_defaults.h"

namespace powersgd {
namespace {

constexpr int kRanks = 2;
constexpr int64_t kNumel = 24 * 32 + 24;

at::Tensor noise(int rank, int step) {
  const auto seed = static_cast<uint64_t>(step * kRanks + rank);
  return at::randn({kNumel}, at::detail::createCPUGenerator(seed));
}

std::shared_ptr<BucketReducer> attach(const std::shared_ptr<Session>& session,
                                      const Options& options) {
  return BucketReducer::attach(session, {"weight", "bias"}, {at::zeros({24, 32}), at::zeros({24})},
                               options);
}

void run(const Options& options,
         const std::function<void(int rank, const std::shared_ptr<Session>&)>& fn) {
  const test::Channels channels(kRanks);
  test::run_ranks(kRanks, [&](int rank, const auto& inner) {
    std::vector<InnerAndChannels> inners = {{c10::DeviceType::CPU, inner, channels.of(rank), {}}};
    const auto session =
        std::make_shared<Session>(rank, kRanks, std::move(inners), options, LogSink());
    try {
      fn(rank, session);
    } catch (...) {
      channels.kill(rank);
      throw;
    }
    session->shutdown();
  });
}

Options make_options(int64_t start = 0) {
  Options options = test::hook_defaults();
  options.matrix_approximation_rank = 2;
  options.start_powerSGD_iter = start;
  return options;
}

c10d::AllreduceOptions reduced_by(c10d::ReduceOp::RedOpType op) {
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  return options;
}

// The mean residual of the weight.
at::Tensor residual(BucketReducer& model) { return model.states()->export_state()[0].residual; }

TEST(BucketReducerExpected, AnAllreduceByItsOwnerIsReduceToTheBit) {
  struct Case {
    c10d::ReduceOp::RedOpType op;
    double divided_after;
    double times_mean;  // what the owner gets, over the mean. Powers of two change no rounding.
  };
  for (const Case& each : {Case{c10d::ReduceOp::AVG, 1, 1}, Case{c10d::ReduceOp::SUM, 2, 1},
                           Case{c10d::ReduceOp::SUM, 1, 2}, Case{c10d::ReduceOp::AVG, 4, 0.25}}) {
    run(make_options(), [&](int rank, const auto& session) {
      const auto expecting = attach(session, make_options());
      const auto reducing = attach(session, make_options());
      for (int step = 0; step < 5; ++step) {
        at::Tensor wanted = noise(rank, step), buffer = wanted.clone();
        reducing->reduce(0, wanted, {0, 1}, kRanks)->wait();
        reducing->end_step();
        expecting->expect(0, buffer, {0, 1}, each.divided_after);
        EXPECT_EQ(session->taker_of({buffer}), expecting);
        const auto work = expecting->reduce_expected(buffer, reduced_by(each.op));
        ASSERT_TRUE(work);
        work->wait();
        expecting->end_step();
        buffer.div_(each.divided_after);
        EXPECT_TRUE(at::equal(buffer, wanted * each.times_mean)) << "step " << step;
      }
      // In the units of what the owner gets.
      EXPECT_TRUE(at::equal(residual(*expecting), residual(*reducing) * each.times_mean));
    });
  }
}

TEST(BucketReducerExpected, OnlyTheAnnouncedMemoryIsExpectedAndOnlyOnce) {
  run(make_options(), [](int rank, const auto& session) {
    const auto model = attach(session, make_options());
    const at::Tensor buffer = noise(rank, 0), both = at::zeros({2 * kNumel});
    EXPECT_FALSE(session->taker_of({buffer}));
    model->expect(0, both.narrow(0, kNumel, kNumel), {0, 1}, 1);
    EXPECT_FALSE(model->expects(buffer));
    EXPECT_FALSE(model->expects(both.narrow(0, 0, kNumel)));
    const at::Tensor again = both.narrow(0, kNumel, kNumel);
    EXPECT_TRUE(model->expects(again));
    EXPECT_FALSE(session->taker_of({again, buffer}));
    {
      const auto gone = attach(session, make_options());
      gone->expect(0, buffer, {0, 1}, 1);
      EXPECT_EQ(session->taker_of({buffer}), gone);
    }
    EXPECT_FALSE(session->taker_of({buffer}));
    model->reduce_expected(again, reduced_by(c10d::ReduceOp::AVG))->wait();
    EXPECT_FALSE(model->expects(again));
  });
}

TEST(BucketReducerExpected, ExactStepsAndOtherReductionsAreLeftToTheCaller) {
  run(make_options(/*start=*/1), [](int rank, const auto& session) {
    const auto model = attach(session, make_options(/*start=*/1));
    const at::Tensor gradient = noise(rank, 0), buffer = gradient.clone();
    const auto is_left = [&](std::vector<size_t> parameters, c10d::ReduceOp::RedOpType op) {
      model->expect(0, buffer, std::move(parameters), 1);
      return !model->reduce_expected(buffer, reduced_by(op)) && at::equal(buffer, gradient);
    };
    EXPECT_TRUE(is_left({0, 1}, c10d::ReduceOp::AVG));  // the first step is exact
    EXPECT_EQ(session->snapshot().exact_calls, 1);
    model->end_step();
    EXPECT_TRUE(is_left({0, 1}, c10d::ReduceOp::MAX));
    EXPECT_TRUE(is_left({}, c10d::ReduceOp::SUM));  // unknown parameters
    EXPECT_FALSE(is_left({0, 1}, c10d::ReduceOp::SUM));
  });
}

}  // namespace
}  // namespace powersgd
