// SPDX-License-Identifier: BSD-3-Clause
#include "powersgd/model/bucket_reducer.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "group/sessions.h"
#include "model/capture_watch.h"
#include "model/parameter_layout.h"
#include "powersgd/group/stats.h"
#include "ranks/one_rank.h"
#include "support/hook_defaults.h"
#include "support/random.h"

namespace powersgd {
namespace {

constexpr int kReducers = 2;  // ranks
constexpr int64_t kFirstTwo = 24 * 32 + 24, kConv = 32 * 54;

at::Tensor gradient_of(int rank, int step) {
  return test::random(static_cast<uint64_t>(step * kReducers + rank), {kFirstTwo + kConv});
}

// A weight, a bias and a channels_last weight. They are reduced as in DDP, in one bucket or in two.
class AttachedModel {
 public:
  AttachedModel(int rank, const std::shared_ptr<Session>& session)
      : reducer(test::attach(session, parameters)), rank_(rank) {}

  // Takes steps 0, 1, ... as `step` does. Their outputs and what is left add up to the gradients.
  void expect_that_nothing_is_lost(int steps, const std::function<at::Tensor(int)>& step) {
    at::Tensor sent = at::zeros({kFirstTwo + kConv}, at::kDouble), asked = at::zeros_like(sent);
    for (int i = 0; i < steps; ++i) {
      sent += step(i);
      for (int rank = 0; rank < kReducers; ++rank) asked += gradient_of(rank, i) / kReducers;
    }
    const at::Tensor left = residuals();
    EXPECT_GT(left.norm().item<double>(), 1);
    EXPECT_LT(test::relative(sent + left, asked), 1e-5);
    EXPECT_EQ(reducer->states()->step(), steps);
  }

  // Returns the averaged gradients of one step.
  at::Tensor step(int number, bool two_buckets, at::ScalarType dtype = at::kFloat) {
    const at::Tensor all = gradient_of(rank_, number).to(dtype);
    if (!two_buckets) {
      reduce(0, all, {0, 1, 2});
    } else {
      reduce(0, all.narrow(0, 0, kFirstTwo), {0, 1});
      reduce(1, all.narrow(0, kFirstTwo, kConv), {2});
    }
    reducer->end_step();
    return all;
  }

  std::vector<at::Tensor> parameters = {
      at::zeros({24, 32}), at::zeros({24}),
      at::zeros({32, 6, 3, 3}).contiguous(at::MemoryFormat::ChannelsLast)};
  const std::shared_ptr<BucketReducer> reducer;

 private:
  void reduce(size_t index, at::Tensor buffer, const std::vector<size_t>& which) {
    std::vector<at::Tensor> members;
    for (const size_t i : which) members.push_back(parameters[i]);
    reducer->reduce(index, buffer, reducer->states()->parameters().find(members), kReducers)
        ->wait();
  }
  // In the order of a bucket's memory.
  at::Tensor residuals() const {
    std::vector<at::Tensor> parts;
    const auto state = reducer->states()->export_state();
    for (size_t i = 0; i < state.size(); ++i) {
      const at::Tensor& residual = state[i].residual;
      parts.push_back(residual.defined() ? to_memory_order(residual, parameters[i]).flatten()
                                         : at::zeros({parameters[i].numel()}));
    }
    return at::cat(parts);
  }

  const int rank_;
};

using SessionPtr = std::shared_ptr<Session>;

// Calls fn(rank, session) on both ranks. Steps before `start` are exact.
void run_reducers(const std::function<void(int, const SessionPtr&)>& fn, int64_t start = 0) {
  Options options = test::compressing(2);
  options.start_powerSGD_iter = start;
  test::run_sessions(kReducers, options,
                     [&](int rank, const SessionPtr& session, auto&&) { fn(rank, session); });
}

TEST(BucketReducer, NothingIsLostWhenBucketsAreRebuilt) {
  run_reducers([](int rank, const SessionPtr& session) {
    AttachedModel model(rank, session);
    model.expect_that_nothing_is_lost(8,
                                      [&](int i) { return model.step(i, /*two_buckets=*/i >= 3); });
  });
}

// FSDP2 reduces in another dtype if its module is converted before its first pass.
TEST(BucketReducer, NothingIsLostWhenBucketsChangeTheirDtype) {
  run_reducers([](int rank, const SessionPtr& session) {
    AttachedModel model(rank, session);
    model.expect_that_nothing_is_lost(9, [&](int i) {
      return model.step(i, /*two_buckets=*/false, i / 3 == 1 ? at::kDouble : at::kFloat);
    });
  });
}

// Its first bucket has nothing that is compressed.
TEST(BucketReducer, AStepThatBrokeOffIsTheLastOne) {
  run_reducers([](int rank, const SessionPtr& session) {
    AttachedModel model(rank, session);
    model.step(0, /*two_buckets=*/false);
    const auto before = model.reducer->states()->export_local();
    at::Tensor bias = at::ones({24});
    model.reducer->reduce(1, bias, {1}, kReducers)->wait();
    model.reducer->states()->step_skipped();
    const auto after = model.reducer->states()->export_local();
    ASSERT_EQ(after.size(), before.size());
    for (size_t i = 0; i < after.size(); ++i) {
      EXPECT_GT(after[i].q_local.norm().item<double>(), 0);
      EXPECT_TRUE(at::equal(after[i].q_local, before[i].q_local));
    }
  });
}

// For example if another rank died in it, and the owner of the group drops the step.
TEST(BucketReducer, AStepEndsInAGroupThatHasEnded) {
  for (const int64_t check_every : {0, 1}) {
    Options options = test::compressing(2);
    options.check_every = check_every;
    test::run_sessions(kReducers, options, [](int rank, const SessionPtr& session, auto&&) {
      AttachedModel model(rank, session);
      for (uint64_t i = 1; i < CaptureWatch::kInterval; ++i) model.step(0, /*two_buckets=*/false);
      session->abort();
      EXPECT_NO_THROW(model.reducer->end_step());
      EXPECT_EQ(model.reducer->states()->step(), CaptureWatch::kInterval);
    });
  }
}

TEST(BucketReducer, AParameterThatWasNotAttachedIsAnError) {
  run_reducers([](int rank, const SessionPtr& session) {
    AttachedModel model(rank, session);
    model.parameters[1] = at::zeros({24});
    EXPECT_THROW(model.step(0, /*two_buckets=*/false), c10::Error);
  });
}

// All-reduces of its buckets that their owner calls itself, as FSDP2 does. The model expects them.

at::Tensor gradient_of_two(int rank, int step) {
  return gradient_of(rank, step).narrow(0, 0, kFirstTwo).clone();
}

std::shared_ptr<BucketReducer> attach_two(const SessionPtr& session) {
  return test::attach(session, test::zeros({{24, 32}, {24}}, at::kCPU));
}

c10d::AllreduceOptions reduced_by(c10d::ReduceOp::RedOpType op) {
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  return options;
}

at::Tensor mean_residual_of_weight(BucketReducer& model) {
  return model.states()->export_state()[0].residual;
}

TEST(ExpectedAllreduce, AnAllreduceByItsOwnerIsReduceToTheBit) {
  struct Case {
    c10d::ReduceOp::RedOpType op;
    double divided_after;
    double times_mean;  // what the owner gets, over the mean. Powers of two change no rounding.
  };
  for (const Case& each : {Case{c10d::ReduceOp::AVG, 1, 1}, Case{c10d::ReduceOp::SUM, 2, 1},
                           Case{c10d::ReduceOp::SUM, 1, 2}, Case{c10d::ReduceOp::AVG, 4, 0.25}}) {
    run_reducers([&](int rank, const SessionPtr& session) {
      const auto expecting = attach_two(session);
      const auto reducing = attach_two(session);
      for (int step = 0; step < 5; ++step) {
        at::Tensor wanted = gradient_of_two(rank, step), buffer = wanted.clone();
        reducing->reduce(0, wanted, {0, 1}, 2)->wait();
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
      EXPECT_TRUE(at::equal(mean_residual_of_weight(*expecting),
                            mean_residual_of_weight(*reducing) * each.times_mean));
    });
  }
}

TEST(ExpectedAllreduce, OnlyTheAnnouncedMemoryIsExpectedAndOnlyOnce) {
  run_reducers([](int rank, const SessionPtr& session) {
    const auto model = attach_two(session);
    const at::Tensor buffer = gradient_of_two(rank, 0), both = at::zeros({2 * kFirstTwo});
    EXPECT_FALSE(session->taker_of({buffer}));
    model->expect(0, both.narrow(0, kFirstTwo, kFirstTwo), {0, 1}, 1);
    EXPECT_FALSE(model->expects(buffer));
    EXPECT_FALSE(model->expects(both.narrow(0, 0, kFirstTwo)));
    const at::Tensor again = both.narrow(0, kFirstTwo, kFirstTwo);
    EXPECT_TRUE(model->expects(again));
    EXPECT_FALSE(session->taker_of({again, buffer}));
    {
      const auto gone = attach_two(session);
      gone->expect(0, buffer, {0, 1}, 1);
      EXPECT_EQ(session->taker_of({buffer}), gone);
    }
    EXPECT_FALSE(session->taker_of({buffer}));
    model->reduce_expected(again, reduced_by(c10d::ReduceOp::AVG))->wait();
    EXPECT_FALSE(model->expects(again));
  });
}

TEST(ExpectedAllreduce, ExactStepsAndOtherReductionsAreLeftToTheCaller) {
  const auto expect_what_is_left = [](int rank, const SessionPtr& session) {
    const auto model = attach_two(session);
    const at::Tensor gradient = gradient_of_two(rank, 0), buffer = gradient.clone();
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
  };
  run_reducers(expect_what_is_left, /*start=*/1);
}

}  // namespace
}  // namespace powersgd
