// SPDX-License-Identifier: BSD-3-Clause
#include "gradients/buffer_slots.h"

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include <deque>

namespace powersgd {
namespace {

TEST(BufferSlots, BuffersThatComeBackAreToldApart) {
  BufferSlots slots;
  const at::Tensor a = at::zeros({8}), b = at::zeros({8}), c = at::zeros({8});
  for (const at::Tensor& tensor : {a, b, c, a, b}) slots.find(tensor);
  EXPECT_EQ(slots.size(), 3u);
  const size_t of_a = slots.find(a), of_b = slots.find(b), of_c = slots.find(c);
  EXPECT_NE(of_a, of_b);
  EXPECT_NE(of_b, of_c);
  EXPECT_NE(of_a, of_c);
  EXPECT_EQ(slots.find(a), of_a);  // in whatever order
  EXPECT_EQ(slots.find(c), of_c);
  EXPECT_EQ(slots.find(b), of_b);
  EXPECT_EQ(slots.size(), 3u);
}

TEST(BufferSlots, PartsOfOneStorageAreToldApart) {
  BufferSlots slots;
  const at::Tensor whole = at::zeros({16});
  for (int i = 0; i < 2; ++i) {
    for (int part = 0; part < 2; ++part) slots.find(whole.narrow(0, 8 * part, 8));
  }
  EXPECT_NE(slots.find(whole.narrow(0, 0, 8)), slots.find(whole.narrow(0, 8, 8)));
}

TEST(BufferSlots, NewTensorsShareOneSlot) {
  BufferSlots slots;
  std::deque<at::Tensor> kept;  // each stays for a while, as a result does
  for (int i = 0; i < 100; ++i) {
    kept.push_back(at::zeros({8}));
    EXPECT_EQ(slots.find(kept.back()), 0u);
    if (kept.size() > 30) kept.pop_front();
  }
  EXPECT_EQ(slots.size(), 1u);
}

TEST(BufferSlots, ANewBufferTakesOverFromTheOneThatIsGone) {
  BufferSlots slots;
  at::Tensor a = at::zeros({8});
  const at::Tensor b = at::zeros({8});
  for (const at::Tensor& tensor : {a, b, a, b}) slots.find(tensor);
  const size_t of_a = slots.find(a), of_b = slots.find(b);
  a = at::Tensor();
  const at::Tensor rebuilt = at::zeros({8});
  EXPECT_EQ(slots.find(rebuilt), of_a);
  EXPECT_EQ(slots.find(b), of_b);
  EXPECT_EQ(slots.size(), 2u);
}

TEST(BufferSlots, ANewBufferLeavesTheSlotOfOneInUse) {
  BufferSlots slots;
  const at::Tensor a = at::zeros({8}), late = at::zeros({8});
  for (int i = 0; i < 3; ++i) slots.find(a);
  EXPECT_NE(slots.find(late), slots.find(a));
}

}  // namespace
}  // namespace powersgd
