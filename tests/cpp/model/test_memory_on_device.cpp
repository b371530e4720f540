// SPDX-License-Identifier: BSD-3-Clause
//
// The memory that compression takes on the device: how much, and when it is allocated.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "fake_device/fake_device.h"
#include "group/flat_tensors.h"
#include "group/sessions.h"
#include "model/scope_block.h"
#include "support/hook_defaults.h"

namespace powersgd {
namespace {

namespace fake = test::fake_device;

constexpr int64_t kStart = 4;  // steps before it are exact
const test::Shapes kParameters = {{256, 512}, {300}, {200, 400}};
using BucketLayout = std::vector<std::vector<size_t>>;  // the parameters of each bucket
const BucketLayout kBefore = {{0, 1, 2}};
const BucketLayout kRebuilt = {{2}, {1, 0}};  // as DDP rebuilds its buckets after the first step

Options starting_later(std::optional<WireDType> wire = {}) {
  Options options = test::compressing(2, wire);
  options.start_powerSGD_iter = kStart;
  return options;
}

class MemoryOnDevice : public testing::Test {
 protected:
  MemoryOnDevice() {
    fake::add_operators();
    fake::reset(1, fake::Host::kMayNotWait);
    parameters_ = test::zeros(kParameters, device_);
    for (const BucketLayout& layout : {kBefore, kRebuilt}) {
      for (const auto& bucket : layout) {
        int64_t numel = 0;
        for (const size_t i : bucket) numel += parameters_[i].numel();
        buffers_.push_back(at::ones({numel}, device_));
      }
    }
    before_ = fake::usage();
  }

  void attach(const Options& options = starting_later()) {
    session_ = test::session_of_equal_ranks(device_, options);
    model_ = test::attach(session_, parameters_);
  }

  void step(const BucketLayout& layout) {
    size_t buffer = &layout == &kBefore ? 0 : kBefore.size();
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
    for (const size_t i : bucket) shapes.push_back({kParameters[i], {}});
    const BucketPlan plan = plan_bucket(shapes, session_->options());
    return memory_needs(plan, session_->options(), at::kFloat, device_.type(),
                        session_->ranks_on(device_));
  }

  // The needs of all buckets of a layout, with workspaces for the largest bucket of both layouts.
  int64_t needs(const BucketLayout& layout) const {
    int64_t own = 0, workspace = 0;
    for (const auto& bucket : layout) own += needs_of(bucket).own();
    for (const BucketLayout& used : {kBefore, kRebuilt}) {
      for (const auto& bucket : used) workspace = std::max(workspace, needs_of(bucket).workspace);
    }
    return own + 2 * workspace;
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
  step(kBefore);
  const size_t of_first = allocations();
  EXPECT_GT(fake::usage().bytes - before_.bytes, of_states);
  step(kBefore);
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
  step(kBefore);
  EXPECT_EQ(uploads(), 1 + kBefore.size());
  step(kRebuilt);
  for (int64_t i = 2; i < kStart + 3; ++i) step(kRebuilt);
  EXPECT_EQ(uploads(), 1 + kBefore.size() + kRebuilt.size());
}

struct Kind {
  const char* name;
  std::optional<WireDType> wire;
  bool residuals = true, copies = false;
};

class MemoryOfAKind : public MemoryOnDevice, public testing::WithParamInterface<Kind> {};

TEST_P(MemoryOfAKind, IsWhatThePlanSays) {
  Options options = starting_later(GetParam().wire);
  options.use_error_feedback = GetParam().residuals;
  options.allow_discard = GetParam().copies;
  attach(options);
  for (int64_t i = 0; i < kStart + 3; ++i) step(i == 0 ? kBefore : kRebuilt);
  const auto peak = static_cast<double>(fake::usage().peak_bytes - before_.bytes);
  const auto now = static_cast<double>(fake::usage().bytes - before_.bytes);
  EXPECT_LE(peak, 1.01 * static_cast<double>(std::max(needs(kBefore), needs(kRebuilt))));
  EXPECT_LE(now, 1.01 * static_cast<double>(needs(kRebuilt)));
  EXPECT_GE(now, 0.99 * static_cast<double>(needs(kRebuilt)));
  const size_t before = allocations();
  step(kRebuilt);
  EXPECT_EQ(allocations(), before);
}

// Without residuals, factors and payloads are the most, and another copy of one would show. So are
// packets.
INSTANTIATE_TEST_SUITE_P(
    Kinds, MemoryOfAKind,
    testing::Values(Kind{"as_it_is", std::nullopt}, Kind{"without_residuals", std::nullopt, false},
                    Kind{"with_a_copy_of_each_steps_state", std::nullopt, true, true},
                    Kind{"int8", WireDType::kInt8, false}),
    [](const auto& kind) { return kind.param.name; });

// Buckets have workspaces in common: one for each bucket would be 3 % of all.
TEST_F(MemoryOnDevice, OfTablesAndWorkspacesIsWithinOnePercent) {
  constexpr int64_t kBuckets = 16;
  std::vector<ParameterShape> block;
  for (const std::vector<int64_t>& shape : test::Shapes{
           {1536, 512}, {1536}, {512, 512}, {512}, {2048, 512}, {2048}, {512, 2048}, {512}}) {
    block.push_back({shape, {}});
  }
  const Options options = test::compressing(4);
  const MemoryNeeds needs =
      memory_needs(plan_bucket(block, options), options, at::kFloat, device_.type());
  const int64_t others = kBuckets * (needs.residual + needs.factors + needs.payloads);
  EXPECT_LE(100 * (kBuckets * needs.tables + 2 * needs.workspace), others)
      << needs.tables << " bytes of tables a bucket, " << needs.workspace << " of a workspace";
}

TEST_F(MemoryOnDevice, OfAModelThatIsNeverCompressedIsItsLossScale) {
  Options options = starting_later();
  options.scope = Scope::kNever;
  attach(options);
  step(kBefore);
  EXPECT_EQ(allocations(), 1u);
}

TEST_F(MemoryOnDevice, OfAFlatTensorIsAllocatedAtItsFirstCall) {
  Options options = starting_later();
  options.min_numel = 1000;
  FlatTensors flat_tensors(test::session_of_equal_ranks(device_, options));
  size_t of_first = 0;
  for (int64_t i = 0; i < kStart + 3; ++i) {
    const test::ScopeBlock pass(true);
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
