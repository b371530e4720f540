// SPDX-License-Identifier: BSD-3-Clause
#include "powersgd/compressor/workspace.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>

#include "fake_device/fake_device.h"
#include "powersgd/compressor/compressor.h"
#include "ranks/one_rank.h"
#include "support/hook_defaults.h"

namespace powersgd {
namespace {

namespace fake = test::fake_device;

class WorkspaceTest : public testing::Test {
 protected:
  WorkspaceTest() {
    fake::add_operators();
    fake::reset(1, fake::Host::kMayNotWait);
  }

  const at::Device device_ = fake::device(0);
  Workspace workspace_;
};

TEST_F(WorkspaceTest, IsAsLargeAsTheLargestBucketNeeds) {
  for (const int64_t bytes : {128, 64, 256, 192}) workspace_.reserve(bytes, device_);
  EXPECT_EQ(fake::usage().bytes, 256u);
  EXPECT_EQ(fake::usage().peak_bytes, 256u);
}

TEST_F(WorkspaceTest, StaysWhereItIsUnlessItGrows) {
  workspace_.reserve(128, device_);
  const void* before = workspace_.data();
  workspace_.reserve(128, device_);
  EXPECT_EQ(workspace_.data(), before);
}

TEST_F(WorkspaceTest, StaysForTheGraphThatHoldsIt) {
  workspace_.reserve(128, device_);
  workspace_.captured();
  workspace_.reserve(256, device_);
  EXPECT_EQ(fake::usage().bytes, 128u + 256u);
  workspace_.reserve(512, device_);  // no graph holds the second
  EXPECT_EQ(fake::usage().bytes, 128u + 512u);
}

TEST_F(WorkspaceTest, OfAPipelineIsOneForEachPart) {
  const Workspaces pipeline = Workspaces::of_pipeline();
  EXPECT_NE(pipeline.first, pipeline.second);
  const Workspaces one_bucket = Workspaces::of_one_bucket();
  EXPECT_EQ(one_bucket.first, one_bucket.second);
}

// The engine runs a first part beside the second part of another bucket.
TEST(Workspaces, EachPartOfAStepUsesItsOwn) {
  const Options options = test::hook_defaults();
  const test::OneRank rank(options);
  const Workspaces workspaces = Workspaces::of_pipeline();
  const auto compressor = make_compressor(rank.plan, rank.states, options, at::kFloat, at::kCPU,
                                          Ranks{}, /*step_counter=*/nullptr, workspaces);
  compressor->prepare();
  const auto bytes =
      2 * memory_needs(rank.plan, options, at::kFloat, c10::DeviceType::CPU).workspace;
  for (const auto& workspace : {workspaces.first, workspaces.second}) {
    workspace->reserve(bytes, at::kCPU);  // as for a larger bucket that is made later
    std::fill_n(static_cast<char*>(workspace->data()), bytes, 'x');
  }
  const auto contents = [bytes](const std::shared_ptr<Workspace>& workspace) {
    return std::string(static_cast<const char*>(workspace->data()), static_cast<size_t>(bytes));
  };
  const std::string untouched(static_cast<size_t>(bytes), 'x');
  at::Tensor gradient = at::ones({rank.plan.gradient_numel});
  compressor->project(gradient, {});
  const std::string first = contents(workspaces.first);
  EXPECT_NE(first, untouched);
  EXPECT_EQ(contents(workspaces.second), untouched);
  compressor->orthogonalize();
  compressor->back_project();
  compressor->reconstruct();
  EXPECT_EQ(contents(workspaces.first), first);
  EXPECT_NE(contents(workspaces.second), untouched);
}

}  // namespace
}  // namespace powersgd
