// SPDX-License-Identifier: BSD-3-Clause
#include "powersgd/group/scope_override.h"

#include <ATen/ThreadLocalState.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <gtest/gtest.h>

#include <memory>
#include <thread>

#include "model/scope_block.h"

namespace powersgd {
namespace {

using Block = test::ScopeBlock;

TEST(ScopeOverride, TheInnermostBlockCounts) {
  EXPECT_FALSE(current_override());
  {
    const Block outer(true);
    const int64_t number = current_override()->block;
    {
      const Block inner(false);
      EXPECT_FALSE(current_override()->enabled);
      EXPECT_NE(current_override()->block, number);
    }
    EXPECT_TRUE(current_override()->enabled);
    EXPECT_EQ(current_override()->block, number);
  }
  EXPECT_FALSE(current_override());
}

TEST(ScopeOverride, EveryBlockHasItsOwnNumber) {
  int64_t first = 0;
  {
    const Block block(true);
    first = current_override()->block;
  }
  const Block block(true);
  EXPECT_NE(current_override()->block, first);
}

// Autograd hands the thread-local state of the thread that calls backward to its own threads.
TEST(ScopeOverride, ABlockHoldsOnTheThreadsOfItsBackwardPass) {
  const Block block(false);
  const at::ThreadLocalState state;
  std::thread([&state, number = current_override()->block] {
    EXPECT_FALSE(current_override());
    const at::ThreadLocalStateGuard guard(state);
    ASSERT_TRUE(current_override());
    EXPECT_FALSE(current_override()->enabled);
    EXPECT_EQ(current_override()->block, number);
  }).join();
}

TEST(ScopeOverride, AnotherLibrarysObjectIsNoOverride) {
  struct Foreign : c10::DebugInfoBase {};
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::INFERENCE_CONTEXT,
                                  std::make_shared<Foreign>());
  EXPECT_FALSE(current_override());
}

}  // namespace
}  // namespace powersgd
