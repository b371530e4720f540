// SPDX-License-Identifier: BSD-3-Clause
#include "compressor/wire_payload.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace powersgd {
namespace {

// A payload of four values and two counts, of one of two ranks that send the same values.
class Payload {
 public:
  explicit Payload(at::ScalarType wire, at::ScalarType type = at::kFloat)
      : memory_(at::zeros({6}, type)), wire_(memory_, wire, /*counts_begin=*/4) {}

  // Returns the tensor that travels.
  at::Tensor& pack(const std::vector<double>& values) {
    memory_.copy_(at::tensor({values[0], values[1], values[2], values[3], 3.0, 0.0}, at::kDouble));
    packed_ = wire_.pack();
    return packed_;
  }

  // `peers` is the number of equal values in the sum.
  void sum_and_unpack(double peers = 2) {
    packed_.mul_(peers);
    wire_.unpack();
  }

  void step(const std::vector<double>& values) {
    pack(values);
    sum_and_unpack();
  }

  // Returns the factor that multiplies the values of the next step on the wire.
  double next_scale() {
    const double sent = pack({0.5, 0, 0, 0}).to(at::kDouble)[0].item<double>();
    return sent / (*this)[0];
  }

  double operator[](int64_t i) const { return memory_[i].item<double>(); }
  double count(int64_t i) const { return (*this)[4 + i]; }
  double non_finite_count() const { return count(1); }
  const at::Tensor& memory() const { return memory_; }
  bool rounds() const { return wire_.rounds(); }

 private:
  const at::Tensor memory_;
  WirePayload wire_;
  at::Tensor packed_;
};

TEST(WirePayload, TravelsAsItIsInItsOwnDtype) {
  Payload payload(at::kFloat);
  EXPECT_FALSE(payload.rounds());
  EXPECT_TRUE(payload.pack({1.0 / 3, 2, 3, 4}).is_same(payload.memory()));
  const double third = payload[0];
  payload.sum_and_unpack();
  EXPECT_EQ(payload[0], 2 * third);
  EXPECT_EQ(payload.count(0), 6);
}

TEST(WirePayload, IsWhatThisRankSendsOnceItIsPacked) {
  for (const at::ScalarType type : {at::kFloat, at::kDouble}) {
    Payload payload(at::kBFloat16, type);
    // bfloat16 has eight bits of precision. Ties go to the even value.
    const std::vector<double> values = {1 + 0x1p-8, 1 + 0x3p-8, -(1 + 0x1p-8 + 0x1p-20), 0x1p-30};
    const std::vector<double> rounded = {1, 1 + 0x4p-8, -(1 + 0x2p-8), 0x1p-30};
    EXPECT_EQ(payload.pack(values).scalar_type(), at::kBFloat16);
    for (size_t i = 0; i < 4; ++i) EXPECT_EQ(payload[static_cast<int64_t>(i)], rounded[i]);
    payload.sum_and_unpack();
    for (size_t i = 0; i < 4; ++i) EXPECT_EQ(payload[static_cast<int64_t>(i)], 2 * rounded[i]);
    EXPECT_EQ(payload.count(0), 6);
    EXPECT_EQ(payload.non_finite_count(), 0);
  }
}

TEST(WirePayload, AnOverflowOnTheWireIsCounted) {
  Payload payload(at::kBFloat16);
  payload.step({3e38, 1, 1, 1});
  EXPECT_EQ(payload.non_finite_count(), 1);
  payload.step({1e38, 1, 1, 1});
  EXPECT_EQ(payload.non_finite_count(), 0);
}

TEST(WirePayload, WithoutCountsNoneIsAdded) {
  at::Tensor memory = at::full({4}, 3e38);
  WirePayload wire(memory, at::kBFloat16, /*counts_begin=*/4);
  wire.pack().mul_(2);
  wire.unpack();
  EXPECT_TRUE(memory.isinf().all().item<bool>());
}

TEST(WirePayload, TheRoundingOfRawSegmentsIsSentLater) {
  at::Tensor memory = at::zeros({3}), asked = at::zeros({2}), sent = at::zeros({2});
  const at::Tensor raw = memory.narrow(0, 0, 2);
  WirePayload wire(memory, at::kBFloat16, /*counts_begin=*/2);
  wire.carry_rounding(raw);
  const auto send = [&](const at::Tensor& values) {
    raw.copy_(values);
    wire.pack();
    wire.unpack();
    sent += raw;
  };
  const at::Tensor zero = at::zeros({2});
  for (int step = 0; step < 99; ++step) {
    const at::Tensor values = at::tensor({1 + 0x1p-9, -3 * 0x1p-20});
    asked += values;
    send(values);
  }
  EXPECT_FALSE(at::equal(sent, asked));
  EXPECT_LT((asked - sent).abs().max().item<float>(), 0x1p-7);
  send(zero);
  EXPECT_TRUE(at::equal(sent, asked));  // float32 holds all of these bits
  send(at::full({2}, 3.4e38));          // an element that overflows is dropped with the step
  send(zero);
  EXPECT_TRUE(at::equal(raw, zero));
}

TEST(WirePayload, ADroppedRoundingIsNotSent) {
  at::Tensor memory = at::full({2}, 1 + 0x1p-9);
  WirePayload wire(memory, at::kBFloat16, /*counts_begin=*/1);
  wire.carry_rounding(memory.narrow(0, 0, 1));
  wire.pack();
  wire.drop_rounding();
  memory.zero_();
  wire.pack();
  EXPECT_TRUE(at::equal(memory, at::zeros({2})));
}

// float16.

TEST(WirePayload, TheFirstOfFloat16TravelsAsItIs) {
  Payload payload(at::kHalf);
  EXPECT_TRUE(payload.pack({1e6, 1e-9, 0, 0}).is_same(payload.memory()));
  payload.sum_and_unpack();
  EXPECT_EQ(payload[0], 2e6);
  EXPECT_EQ(payload.non_finite_count(), 0);
}

// Sums of all sizes come to between 2^10 and 2^11 on the wire, in which float16 rounds to 2^-11.
TEST(WirePayload, ASumLikeTheLastOneFitsFloat16) {
  for (const double size : {1e-25, 3e-9, 0.7, 1.0, 5e4, 1e25}) {
    Payload payload(at::kHalf);
    const std::vector<double> values = {size, -size / 3, size / 7, -size / 500};
    payload.step(values);
    const at::Tensor& packed = payload.pack(values);
    EXPECT_EQ(packed.scalar_type(), at::kHalf);
    const double sum = 2 * packed[0].item<double>();
    EXPECT_GT(sum, 0x1p10) << size;
    EXPECT_LE(sum, 0x1p11) << size;
    for (size_t i = 0; i < 4; ++i) {
      const double rounded = payload[static_cast<int64_t>(i)];
      EXPECT_LE(std::abs(rounded - values[i]), std::abs(values[i]) * 0x1.01p-11) << size;
      EXPECT_EQ(packed[static_cast<int64_t>(i)].item<double>() / rounded,
                packed[0].item<double>() / payload[0]);
    }
    EXPECT_EQ(packed[4].item<double>(), 3) << "counts are not scaled";
    payload.sum_and_unpack();
    EXPECT_NEAR(payload[0], 2 * size, 2 * size * 0x1.01p-11);
    EXPECT_EQ(payload.count(0), 6);
    EXPECT_EQ(payload.non_finite_count(), 0);
  }
}

TEST(WirePayload, TheScaleIsAPowerOfTwo) {
  Payload payload(at::kHalf);
  payload.step({0.3, 0.1, 0, 0});
  EXPECT_EQ(payload.next_scale(), 0x1p11);  // the sum is 0.6
}

TEST(WirePayload, AStepMayGrowAndOneThatGrowsTooMuchIsCounted) {
  Payload payload(at::kHalf);
  payload.step({1.1, 1, 1, 1});
  payload.step({31 * 1.1, 1, 1, 1});
  EXPECT_EQ(payload.non_finite_count(), 0);
  EXPECT_NEAR(payload[0], 62 * 1.1, 62 * 1.1 * 0x1.01p-11);
  payload.step({31 * 1.1 * 70, 1, 1, 1});
  EXPECT_EQ(payload.non_finite_count(), 1);
}

TEST(WirePayload, AfterAnOverflowTheScaleIsSmaller) {
  Payload payload(at::kHalf);
  payload.step({0.5, 1, 1, 1});
  const double scale = payload.next_scale();
  const double inf = std::numeric_limits<double>::infinity();
  payload.step({inf, 1, 1, 1});
  EXPECT_EQ(payload.next_scale(), scale / 256);
  payload.step({0.5, 1, 1, 1});
  EXPECT_EQ(payload.next_scale(), scale);
  // However often steps overflow, the largest that float32 holds still travel.
  for (int i = 0; i < 30; ++i) payload.step({inf, 1, 1, 1});
  payload.step({1e33, 0, 0, 0});
  EXPECT_NEAR(payload[0], 2e33, 2e33 * 0x1.01p-11);
  EXPECT_EQ(payload.non_finite_count(), 0);
}

TEST(WirePayload, AStepWithoutValuesKeepsTheScale) {
  Payload payload(at::kHalf);
  payload.step({0.3, 0.1, 0, 0});
  const double scale = payload.next_scale();
  payload.step({0, 0, 0, 0});
  EXPECT_EQ(payload.next_scale(), scale);
}

TEST(WirePayload, RanksOfUnlikeValuesHaveTheScaleOfTheirSum) {
  Payload large(at::kHalf), small(at::kHalf);
  large.pack({100, 0, 0, 0});
  large.sum_and_unpack(1.01);
  small.pack({1, 0, 0, 0});
  small.sum_and_unpack(101);
  EXPECT_EQ(large.next_scale(), small.next_scale());
}

}  // namespace
}  // namespace powersgd
