// SPDX-License-Identifier: BSD-3-Clause
//
// Splitting, merging and shrinking a group.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "group/recorded_group.h"

namespace powersgd {
namespace {

using c10d::Backend;
using test::kAccelerator;
using test::kCpu;
using test::RecordingBackend;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

struct OtherOptions : Backend::Options {
  OtherOptions() : Backend::Options("other") {}
};

const ForwardingBackend& as_forwarding(const BackendPtr& backend) {
  return dynamic_cast<const ForwardingBackend&>(*backend);
}

std::vector<std::string> keys_after_setting(const std::vector<StorePtr>& stores) {
  std::vector<std::string> values;
  for (size_t i = 0; i < stores.size(); ++i) stores[i]->set("key", std::to_string(i));
  for (const auto& store : stores) values.push_back(store->get_to_str("key"));
  return values;
}

class ChildrenTest : public test::RecordedGroup {
 protected:
  ChildrenTest() : RecordedGroup(2, 4) {
    cpu_->child = c10::make_intrusive<RecordingBackend>(1, 2, "slow child");
    accel_->child = c10::make_intrusive<RecordingBackend>(1, 2, "fast child");
  }
  const StorePtr store_ = c10::make_intrusive<c10d::HashStore>();
  const std::vector<int> ranks_{0, 2};
};

TEST_F(ChildrenTest, SplitHoldsTheChildrenOfTheInners) {
  const auto child = backend_->split(store_, ranks_, cpu_->options);
  EXPECT_EQ(child->getRank(), 1);
  EXPECT_EQ(child->getSize(), 2);
  const auto& inners = as_forwarding(child).inners();
  EXPECT_EQ(inners.at(kCpu).get(), cpu_->child.get());
  EXPECT_EQ(inners.at(kAccelerator).get(), accel_->child.get());
}

TEST_F(ChildrenTest, NoChildOnARankThatIsNoMember) {
  cpu_->child = nullptr;
  accel_->child = nullptr;
  EXPECT_EQ(backend_->split(store_, {0, 1}, cpu_->options).get(), nullptr);
  EXPECT_EQ(accel_->stores.size(), 1u);  // NCCL's split needs every rank
}

TEST_F(ChildrenTest, EveryChildHasItsOwnKeys) {
  backend_->split(store_, ranks_, cpu_->options);
  backend_->split(store_, ranks_, cpu_->options);  // splitGroup, for its second device type
  backend_->merge(store_, cpu_->options, 0, 8);
  std::vector<StorePtr> all = cpu_->stores;
  all.insert(all.end(), accel_->stores.begin(), accel_->stores.end());
  ASSERT_EQ(all.size(), 6u);
  EXPECT_EQ(keys_after_setting(all), (std::vector<std::string>{"0", "1", "2", "3", "4", "5"}));
}

// Rank 2 was in an earlier split without rank 3. The keys of their common group must agree.
TEST_F(ChildrenTest, KeysDoNotDependOnEarlierSplits) {
  backend_->split(c10::make_intrusive<c10d::HashStore>(), {1, 2}, cpu_->options);
  backend_->split(store_, {2, 3}, cpu_->options);
  const auto peer = c10::make_intrusive<RecordingBackend>(3, 4);
  peer->child = c10::make_intrusive<RecordingBackend>(1, 2);
  const auto there = c10::make_intrusive<ForwardingBackend>(3, 4, Inners{{kCpu, peer}});
  there->split(store_, {2, 3}, peer->options);
  cpu_->stores.back()->set("address", "of rank 2");
  EXPECT_EQ(peer->stores.back()->get_to_str("address"), "of rank 2");
}

TEST_F(ChildrenTest, OptionsOfTheInnersOwnTypeArePassedOn) {
  const auto given = c10::make_intrusive<Backend::Options>("recording");
  backend_->split(store_, ranks_, given);
  EXPECT_EQ(cpu_->child_options.back().get(), given.get());
}

TEST_F(ChildrenTest, OtherOptionsBecomeTheInnersWithTheCallersNameAndTimeout) {
  const auto given = c10::make_intrusive<OtherOptions>();
  given->timeout = std::chrono::milliseconds(77);
  given->group_name = "child";
  given->group_desc = "a child";
  backend_->split(store_, ranks_, given);
  const auto& passed = accel_->child_options.back();
  EXPECT_EQ(passed->backend, "recording");
  EXPECT_EQ(passed->timeout, std::chrono::milliseconds(77));
  EXPECT_EQ(passed->group_name, "child");
  EXPECT_EQ(passed->group_desc, "a child");
  backend_->split(store_, ranks_, nullptr);
  EXPECT_EQ(accel_->child_options.back()->backend, "recording");
}

TEST_F(ChildrenTest, GlobalRanksAreThereForGlooToRead) {
  backend_->split(store_, ranks_, cpu_->options);
  EXPECT_EQ(cpu_->options->global_ranks_in_group, (std::vector<uint64_t>{0, 1, 2, 3}));

  accel_->options->global_ranks_in_group = {8, 9, 10, 11};  // those that it was made with stay
  const auto backend = c10::make_intrusive<ForwardingBackend>(2, 4, Inners{{kAccelerator, accel_}});
  backend->split(store_, ranks_, accel_->options);
  accel_->options->global_ranks_in_group = {8, 10};  // Gloo's split leaves the child's
  backend->split(store_, ranks_, accel_->options);
  EXPECT_EQ(accel_->options->global_ranks_in_group, (std::vector<uint64_t>{8, 9, 10, 11}));
}

TEST_F(ChildrenTest, MergeAndShrinkAskEveryInner) {
  const auto merged = backend_->merge(store_, cpu_->options, 1, 2);
  EXPECT_EQ(as_forwarding(merged).inners().at(kCpu).get(), cpu_->child.get());
  EXPECT_EQ(accel_->calls.back().method, "merge");

  const std::vector<int64_t> excluded{3};
  const auto shrunk = backend_->shrink(excluded, 4, nullptr);
  EXPECT_EQ(as_forwarding(shrunk).inners().at(kAccelerator).get(), accel_->child.get());
  RecordingBackend direct;
  direct.shrink(excluded, 4, nullptr);
  EXPECT_EQ(accel_->calls.back(), direct.calls.back());
  EXPECT_EQ(accel_->child_options.back().get(), nullptr);
}

}  // namespace
}  // namespace powersgd
