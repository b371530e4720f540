// SPDX-License-Identifier: BSD-3-Clause
#include "powersgd/workspace.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "support/fake_device.h"

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

}  // namespace
}  // namespace powersgd
