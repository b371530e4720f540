// SPDX-License-Identifier: BSD-3-Clause
//
// The memory that compression takes on the device: how much, and when it is allocated.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fake_device/fake_device.h"
#include "gradients/flat_tensors.h"
#include "gradients/session_of_equal_ranks.h"
#include "powersgd/bucket_reducer.h"
#include "support/hook_defaults.h"

namespace powersgd {
namespace {

namespace fake = test::fake_device;

constexpr int64_t kStart = 4;  // steps before it are exact
const std::vector<std::vector<int64_t>> kShapes = {{256, 512}, {300}, {200, 400}};
using Layout = std::vector<std::vector<size_t>>;  // the parameters of each bucket
const Layout kFirst = {{0, 1, 2}};
const Layout kRebuilt = {{2}, {1, 0}};  // as DDP rebuilds its buckets after the first step

Options make_options() {
  Options options = test::hook_defaults();
  options.matrix_approximation_rank = 2;
  options.start_powerSGD_iter = kStart;
  return options;
}

class MemoryOnDevice : public testing::Test {
 protected:
  MemoryOnDevice() {
    fake::add_operators();
    fake::reset(1, fake::Host::kMayNotWait);
    for (const auto& shape : kShapes) parameters_.push_back(at::zeros(shape, device_));
    for (const Layout& layout : {kFirst, kRebuilt}) {
      for (const auto& bucket : layout) {
        int64_t numel = 0;
        for (const size_t i : bucket) numel += parameters_[i].numel();
        buffers_.push_back(at::ones({numel}, device_));
      }
    }
    session_ = test::make_session_of_equal_ranks(device_, make_options());
    before_ = fake::usage();
  }

  void attach() {
    model_ = BucketReducer::attach(session_, {"first", "bias", "second"}, parameters_,
                                   session_->options());
  }

  void step(const Layout& layout) {
    size_t buffer = &layout == &kFirst ? 0 : kFirst.size();
    for (size_t bucket = 0; bucket < layout.size(); ++bucket) {
      model_->reduce(bucket, buffers_[buffer++], layout[bucket], 2)->wait();
    }
    model_->end_step();
    fake::run();
  }

  size_t allocations() const { return fake::usage().allocations - before_.allocations; }
  size_t uploads() const { return fake::usage().uploads - before_.uploads; }

  MemoryNeeds needs_of(const std::vector<size_t>& bucket) const {
    std::vector<ParameterShape> shapes;
    for (const size_t i : bucket) shapes.push_back({kShapes[i], {}});
    const BucketPlan plan = plan_bucket(shapes, session_->options());
    return memory_needs(plan, session_->options(), at::kFloat, device_.type(), session_->ranks());
  }

  // The needs of all buckets of a layout, with workspaces for the largest bucket of both layouts.
  int64_t needs(const Layout& layout) const {
    int64_t own = 0, workspace = 0;
    for (const auto& bucket : layout) own += needs_of(bucket).own();
    for (const Layout& used : {kFirst, kRebuilt}) {
      for (const auto& bucket : used) workspace = std::max(workspace, needs_of(bucket).workspace);
    }
    return own + 2 * workspace;
  }

  void compare_with_plan(const Options& options) {
    session_ = test::make_session_of_equal_ranks(device_, options);
    attach();
    for (int64_t i = 0; i < kStart + 3; ++i) step(i == 0 ? kFirst : kRebuilt);
    const auto peak = static_cast<double>(fake::usage().peak_bytes - before_.bytes);
    const auto now = static_cast<double>(fake::usage().bytes - before_.bytes);
    EXPECT_LE(peak, 1.01 * static_cast<double>(std::max(needs(kFirst), needs(kRebuilt))));
    EXPECT_LE(now, 1.01 * static_cast<double>(needs(kRebuilt)));
    EXPECT_GE(now, 0.99 * static_cast<double>(needs(kRebuilt)));
  }

  const at::Device device_ = fake::device(0);
  std::vector<at::Tensor> parameters_, buffers_;
  std::shared_ptr<Session> session_;
  std::shared_ptr<BucketReducer> model_;
  fake::Usage before_;
};

TEST_F(MemoryOnDevice, IsAllocatedWhenALayoutIsFirstSeen) {
  attach();
  EXPECT_GT(allocations(), 0u);
  const size_t of_states = fake::usage().bytes - before_.bytes;
  step(kFirst);
  const size_t of_first = allocations();
  EXPECT_GT(fake::usage().bytes - before_.bytes, of_states);
  step(kFirst);
  EXPECT_EQ(allocations(), of_first);
  step(kRebuilt);
  const size_t of_both = allocations();
  EXPECT_GT(of_both, of_first);
  for (int64_t i = 3; i < kStart + 3; ++i) step(kRebuilt);
  EXPECT_GT(session_->stats()->host_counts().compressed_calls, 0);
  EXPECT_EQ(allocations(), of_both);
}

TEST_F(MemoryOnDevice, IsFreedByDetachExceptForTheScaleAndTheCounts) {
  attach();
  for (int64_t i = 0; i < kStart + 3; ++i) step(kRebuilt);
  model_->detach();
  step(kRebuilt);
  EXPECT_LE(fake::usage().bytes - before_.bytes, 64);
}

TEST_F(MemoryOnDevice, IsFilledByOneCopyPerBucket) {
  attach();
  EXPECT_EQ(uploads(), 1u);  // of all states
  step(kFirst);
  EXPECT_EQ(uploads(), 1 + kFirst.size());
  step(kRebuilt);
  for (int64_t i = 2; i < kStart + 3; ++i) step(kRebuilt);
  EXPECT_EQ(uploads(), 1 + kFirst.size() + kRebuilt.size());
}

TEST_F(MemoryOnDevice, IsWhatThePlanSays) { compare_with_plan(make_options()); }

// Factors and payloads are then the most, and another copy of one would show.
TEST_F(MemoryOnDevice, WithoutResidualsIsWhatThePlanSays) {
  Options options = make_options();
  options.use_error_feedback = false;
  compare_with_plan(options);
}

TEST_F(MemoryOnDevice, WithACopyOfEachStepsStateIsWhatThePlanSays) {
  Options options = make_options();
  options.allow_discard = true;
  compare_with_plan(options);
}

// So are packets.
TEST_F(MemoryOnDevice, OnAWireThatRoundsIsWhatThePlanSays) {
  Options options = make_options();
  options.wire_dtype = WireDType::kInt8;
  options.use_error_feedback = false;
  compare_with_plan(options);
  const size_t before = allocations();
  for (int64_t i = 0; i < 3; ++i) step(kRebuilt);
  EXPECT_EQ(allocations(), before);
}

// Buckets have workspaces in common: one for each bucket would be 3 % of all.
TEST_F(MemoryOnDevice, OfTablesAndWorkspacesIsWithinOnePercent) {
  constexpr size_t kBlocks = 16;
  const std::vector<std::vector<int64_t>> block = {{1536, 512}, {1536}, {512, 512},  {512},
                                                   {2048, 512}, {2048}, {512, 2048}, {512}};
  Options options = make_options();
  options.matrix_approximation_rank = 4;
  std::vector<std::string> names;
  std::vector<at::Tensor> parameters;
  std::vector<ParameterShape> shapes;
  int64_t numel = 0;
  for (const auto& shape : block) shapes.push_back({shape, {}});
  for (const auto& shape : shapes) numel += shape.numel();
  at::Tensor buffer = at::empty({numel}, device_);
  Layout layout(kBlocks);
  for (std::vector<size_t>& bucket : layout) {
    for (const auto& shape : block) {
      bucket.push_back(parameters.size());
      names.push_back(std::to_string(parameters.size()));
      // They lie over each other, because nothing reads them.
      parameters.push_back(buffer.narrow(0, 0, c10::multiply_integers(shape)).view(shape));
    }
  }
  before_ = fake::usage();
  session_ = test::make_session_of_equal_ranks(device_, options);
  model_ = BucketReducer::attach(session_, names, parameters, options);
  for (size_t i = 0; i < kBlocks; ++i) model_->reduce(i, buffer, layout[i], 2)->wait();
  fake::run();
  const MemoryNeeds needs =
      memory_needs(plan_bucket(shapes, options), options, at::kFloat, device_.type());
  const int64_t without = kBlocks * (needs.residual + needs.factors + needs.payloads);
  const int64_t taken = fake::usage().peak_bytes - before_.bytes;
  EXPECT_LE(static_cast<double>(taken), 1.01 * static_cast<double>(without))
      << needs.tables << " bytes of tables a bucket, " << needs.workspace << " of a workspace";
  EXPECT_GE(taken, without);
}

TEST_F(MemoryOnDevice, OfAModelThatIsNeverCompressedIsItsLossScale) {
  Options options = make_options();
  options.scope = Scope::kNever;
  model_ = BucketReducer::attach(session_, {"first", "bias", "second"}, parameters_, options);
  step(kFirst);
  EXPECT_EQ(allocations(), 1u);
}

TEST_F(MemoryOnDevice, OfAFlatTensorIsAllocatedAtItsFirstCall) {
  Options options = make_options();
  options.scope = Scope::kAlways;
  options.min_numel = 1000;
  const auto session = test::make_session_of_equal_ranks(device_, options);
  FlatTensors flat_tensors(session);
  size_t of_first = 0;
  for (int64_t i = 0; i < kStart + 3; ++i) {
    std::vector<at::Tensor> tensors = {buffers_[0]};
    const auto work = flat_tensors.reduce(tensors, {});
    EXPECT_EQ(static_cast<bool>(work), i >= kStart);
    if (work) work->wait();
    fake::run();
    if (i == 0) of_first = allocations();
    EXPECT_EQ(allocations(), of_first) << "call " << i;
  }
  EXPECT_GT(of_first, 0u);
}

}  // namespace
}  // namespace powersgd
