// SPDX-License-Identifier: BSD-3-Clause
#include "group/replicas.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "group/sessions.h"
#include "powersgd/group/stats.h"
#include "support/hook_defaults.h"

namespace powersgd {
namespace {

constexpr int kReplicas = 3;

// A state whose Q and P are the same on all ranks, and whose memory is not.
ParameterStatePtr make_replica(int rank) {
  auto state = std::make_shared<ParameterState>();
  ParameterState::allocate({{state.get(), {20, 30}, 2}}, test::hook_defaults(), at::kCPU);
  state->p_hat.copy_(at::sin(at::arange(40, at::kFloat)).view({20, 2}));
  state->q_local.copy_(at::cos(at::arange(60, at::kFloat) * (rank + 1)).view({2, 30}));
  state->memory.copy_(at::sin(at::arange(600, at::kFloat) * (rank + 2)).view({20, 30}));
  return state;
}

struct Damage {
  const char* name;
  bool q, p;
};

class ReplicasDiffer : public ::testing::TestWithParam<Damage> {};

// One unit in the last place of one number, on rank 2.
TEST_P(ReplicasDiffer, AreFoundAndMadeTheFirstRanks) {
  test::run_sessions(
      kReplicas, test::hook_defaults(), [&](int rank, const auto& session, const auto& log) {
        const auto good = make_replica(rank), bad = make_replica(rank);
        const at::Tensor q = bad->q_warm.clone(), p = bad->p_hat.clone();
        if (rank == 2 && GetParam().q) bad->q_warm.view(at::kInt)[1][29].bitwise_xor_(1);
        if (rank == 2 && GetParam().p) bad->p_hat.view(at::kInt)[0][0].bitwise_xor_(1);
        const at::Tensor kept = bad->residual(), memory = good->memory.clone();
        session->check_replicas({{"good", good}, {"'bad'", bad}}, at::kCPU, session->stats());
        session->run_after_steps(at::kCPU, [] {});
        EXPECT_EQ(session->snapshot().differences, 1);
        const std::string what = GetParam().name;
        EXPECT_EQ(log.lines.size(), 1u);
        EXPECT_EQ(log.count("warning: "), 1);
        EXPECT_EQ(log.count("the " + what + " of 'bad' differed from rank 0's on rank 2"), 1);
        EXPECT_TRUE(at::equal(bad->q_warm, q));
        EXPECT_TRUE(at::equal(bad->p_hat, p));
        EXPECT_TRUE(at::equal(bad->residual(), kept)) << "to the bit: it is folded into the memory";
        EXPECT_TRUE(at::equal(good->memory, memory)) << "one that agrees is left alone";
      });
}

INSTANTIATE_TEST_SUITE_P(All, ReplicasDiffer,
                         ::testing::Values(Damage{"Q", true, false}, Damage{"P", false, true},
                                           Damage{"Q and P", true, true}),
                         [](const auto& info) {
                           return std::string(info.param.q ? "Q" : "") + (info.param.p ? "P" : "");
                         });

TEST(Replicas, ThoseNotYetStartedAreLeftOut) {
  test::run_sessions(kReplicas, test::hook_defaults(),
                     [](int, const auto& session, const auto& log) {
                       session->check_replicas({{"empty", std::make_shared<ParameterState>()}},
                                               at::kCPU, session->stats());
                       session->run_after_steps(at::kCPU, [] {});
                       EXPECT_EQ(session->snapshot().differences, 0);
                       EXPECT_TRUE(log.lines.empty());
                     });
}

}  // namespace
}  // namespace powersgd
