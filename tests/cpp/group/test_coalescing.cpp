// SPDX-License-Identifier: BSD-3-Clause
//
// All-reduces inside of a coalescing block: an inner backend that coalesces (NCCL) issues none of
// them before the block ends.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "model/scope_block.h"
#include "powersgd/group/backend.h"
#include "powersgd/group/stats.h"
#include "powersgd/model/bucket_reducer.h"
#include "powersgd/model/model_states.h"
#include "ranks/connected.h"
#include "ranks/two_equal_ranks.h"
#include "support/errors.h"
#include "support/hook_defaults.h"
#include "support/recording_backend.h"

namespace powersgd {
namespace {

using Names = std::vector<std::string>;

class Coalescing : public testing::TestWithParam<bool> {  // whether the inner backend coalesces
 protected:
  Coalescing() {
    inner_->coalesces = GetParam();
    const auto engine = c10::make_intrusive<test::HostBackend>();
    std::vector<InnerAndConnect> inners = {
        {c10::DeviceType::CPU, inner_, test::connected(engine), {}}};
    backend_ = c10::make_intrusive<BackendPowerSGD>(0, 2, std::move(inners), test::compressing(1));
  }

  int64_t compressed() { return backend_->session()->snapshot().compressed_calls; }

  const c10::intrusive_ptr<test::RecordingBackend> inner_ =
      c10::make_intrusive<test::RecordingBackend>();
  c10::intrusive_ptr<BackendPowerSGD> backend_;
  std::vector<at::Tensor> tensors_ = {at::ones({64, 64})};
};

TEST_P(Coalescing, EveryAllreduceInsideIsForwardedExactly) {
  const test::ScopeBlock block(true);
  backend_->startCoalescing();
  EXPECT_EQ(backend_->allreduce(tensors_), inner_->work);
  EXPECT_EQ(backend_->allreduce_coalesced(tensors_, {}), inner_->work);
  backend_->endCoalescing();
  EXPECT_EQ(inner_->methods(),
            (Names{"startCoalescing", "allreduce", "allreduce_coalesced", "endCoalescing"}));
  EXPECT_EQ(compressed(), 0);
}

TEST_P(Coalescing, ThoseAfterItAreCompressedAgain) {
  const test::ScopeBlock block(true);
  backend_->startCoalescing();
  backend_->endCoalescing();
  backend_->allreduce(tensors_)->wait();
  EXPECT_EQ(inner_->methods(), (Names{"startCoalescing", "endCoalescing"}));
  EXPECT_EQ(compressed(), 1);
}

TEST_P(Coalescing, WhatAnAttachedModelReducesInsideIsAnErrorThatLosesNothing) {
  const auto states = std::make_shared<ModelStates>(
      backend_->session(), NamedParameters({"weight"}, tensors_), test::compressing(1));
  const auto reducer = std::make_shared<BucketReducer>(backend_->session(), states);
  at::Tensor gradient = at::ones({64 * 64});
  const auto reduce = [&](bool more_follow) {
    return reducer->reduce(0, gradient, {0}, /*divisor=*/2, more_follow);
  };
  const auto deferred = reduce(/*more_follow=*/true);
  backend_->startCoalescing();
  EXPECT_TRUE(deferred->wait()) << "it began before the block";
  const at::Tensor kept = gradient.clone();
  const int64_t step = states->step();
  EXPECT_TRUE(test::contains(test::error_of([&] { reduce(false); }), "coalescing"));
  EXPECT_TRUE(at::equal(gradient, kept));
  EXPECT_EQ(states->step(), step);
  backend_->endCoalescing();
  EXPECT_TRUE(reduce(false)->wait());
}

TEST(RefusedCoalescing, LeavesCompressionOn) {
  const auto host = c10::make_intrusive<test::HostBackend>();
  const auto backend = c10::make_intrusive<BackendPowerSGD>(
      0, 2, std::vector<InnerAndConnect>{{c10::DeviceType::CPU, host, test::connected(host), {}}},
      test::compressing(1));
  const test::ScopeBlock block(true);
  EXPECT_ANY_THROW(backend->startCoalescing());
  std::vector<at::Tensor> tensors = {at::ones({64, 64})};
  EXPECT_TRUE(backend->allreduce(tensors)->wait());
  EXPECT_EQ(backend->session()->snapshot().compressed_calls, 1);
}

INSTANTIATE_TEST_SUITE_P(Inner, Coalescing, testing::Bool(), [](const auto& coalesces) {
  return coalesces.param ? "Coalesces" : "RunsAtOnce";
});

}  // namespace
}  // namespace powersgd
