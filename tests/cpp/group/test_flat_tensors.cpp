// SPDX-License-Identifier: BSD-3-Clause
#include "group/flat_tensors.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "group/sessions.h"
#include "model/scope_block.h"
#include "support/backward.h"
#include "support/hook_defaults.h"
#include "support/random.h"

namespace powersgd {
namespace {

using test::in_backward;
using test::random;

constexpr int64_t kRows = 32, kCols = 48;

// Two random matrices of rank 2 differ in all of their directions.
at::Tensor random_of_rank_2(uint64_t seed) {
  return random(seed, {kRows, 2}).matmul(random(seed + 1000, {2, kCols}));
}

// Almost 0: of a tensor that is 0 nothing is sent.
at::Tensor negligible() { return at::full({kRows, kCols}, 1e-20); }

void in_block(bool enabled, const std::function<void()>& body) {
  const test::ScopeBlock block(enabled);
  body();
}

Options in_scope(Scope scope) {
  Options options = test::compressing(1);
  options.scope = scope;
  options.min_numel = 1000;
  return options;
}

// The flat tensors of rank 0 of two equal ranks: a sum is twice the tensor.
class Flat {
 public:
  explicit Flat(const Options& options)
      : session_(test::session_of_equal_ranks(at::kCPU, options, log_.sink())),
        flat_tensors_(session_) {}

  // True if the tensor was reduced compressed.
  bool reduce(const at::Tensor& tensor, const c10d::AllreduceOptions& opts = {}) {
    const auto work = flat_tensors_.reduce({tensor}, opts);
    if (work) work->wait();
    return static_cast<bool>(work);
  }
  // The output of a tensor that is compressed.
  at::Tensor output_of(const at::Tensor& tensor, const c10d::AllreduceOptions& opts = {}) {
    const at::Tensor output = tensor.clone();
    EXPECT_TRUE(reduce(output, opts));
    return output;
  }
  // The number of tensors that are compressed or will be, once the warm-up is over.
  int64_t admitted() { return stats().compressed_calls + stats().exact_calls; }
  StatsSnapshot stats() { return session_->snapshot(); }
  int lines_with(const std::string& part) const { return log_.count(part); }
  FlatTensors& operator*() { return flat_tensors_; }

 private:
  test::Log log_;
  const std::shared_ptr<Session> session_;
  FlatTensors flat_tensors_;
};

// The tensors that are admitted.

TEST(FlatTensors, TheScopeSaysWhichTensorsAreAdmitted) {
  const auto admitted = [](Scope scope, const at::Tensor& tensor, auto&& where) {
    Flat flat(in_scope(scope));
    where([&] { flat.reduce(tensor.clone()); });
    return flat.admitted() == 1;
  };
  const auto outside = [](const std::function<void()>& body) { body(); };
  const auto allowed = [](const std::function<void()>& body) { in_block(true, body); };
  const auto forbidden = [](const std::function<void()>& body) { in_block(false, body); };
  const at::Tensor flat = random(0, {1200}), matrix = random(0, {30, 40}), small = random(0, {900});

  EXPECT_TRUE(admitted(Scope::kBackward, flat, in_backward));
  EXPECT_FALSE(admitted(Scope::kBackward, matrix, in_backward)) << "a gradient of DDP is flat";
  EXPECT_FALSE(admitted(Scope::kBackward, small, in_backward)) << "below min_numel";
  EXPECT_FALSE(admitted(Scope::kBackward, flat, outside));
  for (const at::Tensor& tensor : {flat, matrix, small}) {
    for (const Scope scope : {Scope::kAttached, Scope::kNever}) {
      EXPECT_FALSE(admitted(scope, tensor, outside));
      EXPECT_FALSE(admitted(scope, tensor, in_backward));
    }
    for (const Scope scope : {Scope::kBackward, Scope::kAttached, Scope::kNever}) {
      EXPECT_TRUE(admitted(scope, tensor, allowed));
      EXPECT_FALSE(admitted(scope, tensor, forbidden));
    }
  }
}

TEST(FlatTensors, OtherCallsAreForwarded) {
  Flat flat(in_scope(Scope::kBackward));
  const at::Tensor matrix = random(0, {kRows, kCols});
  c10d::AllreduceOptions largest;
  largest.reduceOp = c10d::ReduceOp::MAX;
  in_block(true, [&] {
    EXPECT_FALSE(flat.reduce(matrix, largest));
    EXPECT_FALSE(flat.reduce(matrix.t()));
    EXPECT_FALSE(flat.reduce(matrix.to(at::kInt)));
    EXPECT_FALSE(flat.reduce(matrix.to_sparse()));
    EXPECT_FALSE(flat.reduce(at::zeros({0, 5})));
    EXPECT_FALSE(flat.reduce(at::zeros({3})) || (*flat).reduce({matrix, matrix}, {}));
    EXPECT_EQ(flat.admitted(), 0);
    EXPECT_TRUE(flat.reduce(matrix));
  });
}

TEST(FlatTensors, AGroupOfOneForwardsAll) {
  FlatTensors flat_tensors(std::make_shared<Session>(0, 1, std::vector<InnerAndConnect>(),
                                                     in_scope(Scope::kBackward), LogSink()));
  in_block(true, [&] { EXPECT_FALSE(flat_tensors.reduce({random(0, {kRows, kCols})}, {})); });
}

// The steps in which a tensor is compressed.

TEST(FlatTensors, AreExactUntilCompressionStarts) {
  Options options = in_scope(Scope::kBackward);
  options.start_powerSGD_iter = 2;
  Flat flat(options);
  for (int pass = 0; pass < 4; ++pass) {
    in_block(true, [&] {
      EXPECT_EQ(flat.reduce(random(1, {kRows, kCols})), pass >= 2);
      EXPECT_EQ(flat.reduce(random(2, {kRows, kCols})), pass >= 2);
    });
  }
  EXPECT_EQ(flat.stats().steps, 4) << "a block is a step";
  EXPECT_EQ(flat.stats().exact_calls, 4);
  EXPECT_EQ(flat.stats().compressed_calls, 4);
}

TEST(FlatTensors, AFlatGradientIsExactUntilDdpHasRebuiltItsBuckets) {
  Flat flat(in_scope(Scope::kBackward));
  const at::Tensor bucket = random(1, {2000});
  for (int pass = 0; pass < 4; ++pass) {
    in_backward([&] { EXPECT_EQ(flat.reduce(bucket), pass >= 2); });
  }
  EXPECT_EQ(flat.lines_with("torch_powersgd.attach(ddp) compresses layer by layer"), 1);
}

// State.

// The first output holds one direction of two, and those of negligible gradients the rest: of each
// tensor its own, although both have the same shape.
TEST(FlatTensors, ATensorIsKnownByItsOrderInThePass) {
  Flat flat(in_scope(Scope::kBackward));
  const std::vector<at::Tensor> gradients = {random_of_rank_2(1), random_of_rank_2(2)};
  std::vector<at::Tensor> sent = {at::zeros({kRows, kCols}), at::zeros({kRows, kCols})};
  for (int pass = 0; pass < 4; ++pass) {
    in_block(true, [&] {
      for (size_t i = 0; i < 2; ++i) {
        sent[i] += flat.output_of(pass == 0 ? gradients[i] : negligible());
      }
    });
    if (pass > 0) continue;
    for (size_t i = 0; i < 2; ++i) {
      EXPECT_FALSE(at::allclose(sent[i], 2 * gradients[i], 0.1, 0.1)) << "nothing is left";
    }
  }
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_TRUE(at::allclose(sent[i], 2 * gradients[i], 0, 1e-4)) << "tensor " << i;
  }
}

TEST(FlatTensors, AStateThatManyPassesHaveNotUsedIsDropped) {
  Flat flat(in_scope(Scope::kBackward));
  const auto pass = [&](const at::Tensor& tensor) {
    in_block(true, [&] { flat.output_of(tensor); });
  };
  pass(random_of_rank_2(1));
  for (int i = 0; i < 100; ++i) pass(at::ones({40, 40}));
  EXPECT_EQ(flat.lines_with("dropped the state of 1 flat tensors"), 0);
  pass(at::ones({40, 40}));
  EXPECT_EQ(flat.lines_with("dropped the state of 1 flat tensors"), 1);
  at::Tensor output;
  in_block(true, [&] { output = flat.output_of(negligible()); });
  EXPECT_LT(output.abs().max().item<float>(), 1e-15) << "its residual is gone";
}

// Two models that look alike run backward one after the other, in buffers of their own.
TEST(FlatTensors, BuffersThatTakeTurnsGetNoResidualOfEachOther) {
  Flat flat(in_scope(Scope::kBackward));
  const std::vector<at::Tensor> buffers = {at::zeros({kRows * kCols}), at::zeros({kRows * kCols})};
  const auto backward = [&](size_t model, const at::Tensor& gradient) {
    buffers[model].copy_(gradient.flatten());
    in_backward([&] { flat.reduce(buffers[model]); });
  };
  for (uint64_t step = 0; step < 4; ++step) {
    backward(0, random(step, {kRows, kCols}));
    backward(1, random(step + 10, {kRows, kCols}));
  }
  backward(0, negligible());
  EXPECT_LT(buffers[0].abs().max().item<float>(), 1e-15);
  EXPECT_EQ(flat.lines_with("several models take turns with flat gradients of 1536 elements"), 1);
}

TEST(FlatTensors, ABufferThatIsReplacedKeepsItsResidual) {
  Flat flat(in_scope(Scope::kBackward));
  at::Tensor last;
  for (uint64_t step = 0; step < 5; ++step) {
    last = (step < 4 ? random(step, {kRows, kCols}) : negligible()).flatten();
    in_backward([&] { flat.reduce(last); });
  }
  EXPECT_GT(last.abs().max().item<float>(), 0.1);
  EXPECT_EQ(flat.lines_with("several models"), 0);
}

// The scales of a step.

TEST(FlatTensors, AnAverageIsTheSumOverTheRanks) {
  c10d::AllreduceOptions average;
  average.reduceOp = c10d::ReduceOp::AVG;
  const at::Tensor gradient = random(1, {kRows, kCols});
  Flat averages(in_scope(Scope::kBackward)), sums(in_scope(Scope::kBackward));
  in_block(true, [&] {
    EXPECT_TRUE(at::equal(averages.output_of(gradient, average) * 2, sums.output_of(gradient)));
  });
}

// Ranks in DDP's join().

TEST(FlatTensors, AnExactSumLikeAFlatGradientWarnsOnce) {
  Flat flat(in_scope(Scope::kBackward));
  c10d::AllreduceOptions async, sync;
  async.asyncOp = true;
  sync.asyncOp = false;
  const std::string warning = "If this rank has run out of inputs in DDP's join()";
  flat.reduce(at::zeros({2000}), async);
  in_backward([&] { flat.reduce(random(1, {2000})); });
  for (const auto& [numel, opts] : {std::pair(2000, sync), std::pair(3000, async)}) {
    EXPECT_FALSE(flat.reduce(at::zeros({numel}), opts));
  }
  EXPECT_EQ(flat.lines_with(warning), 0);
  for (int i = 0; i < 2; ++i) EXPECT_FALSE(flat.reduce(at::zeros({2000}), async));
  EXPECT_EQ(flat.lines_with(warning), 1);
}

}  // namespace
}  // namespace powersgd
