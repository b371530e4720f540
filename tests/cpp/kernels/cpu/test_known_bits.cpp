// SPDX-License-Identifier: BSD-3-Clause
//
// What all ranks must agree on has the same bits on every processor, because the ranks of a job may
// run on several kinds. test_reproducible.cpp compares the instruction sets of one machine; the
// digests here compare machines. Only a change that is meant to change these bits changes them.
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "kernels/fixtures/kernel_test.h"
#include "kernels/fixtures/packet_test.h"

namespace powersgd::test {
namespace {

// FNV-1a.
class Digest {
 public:
  void add(const std::vector<uint8_t>& bytes) {
    for (const uint8_t byte : bytes) value_ = (value_ ^ byte) * 0x100000001B3;
  }
  uint64_t value() const { return value_; }

 private:
  uint64_t value_ = 0xCBF29CE484222325;
};

// Numbers of many magnitudes, exact in double: a normal distribution would depend on log().
Values exact_values(int64_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  Values values(static_cast<size_t>(count));
  for (double& value : values) {
    value = std::ldexp(static_cast<double>(static_cast<int64_t>(random()) >> 11), -52);
    value = std::ldexp(value, static_cast<int>(random() % 16) - 8);
  }
  return values;
}

// With every third element of P zero, columns are dead, and later passes follow.
void add_stages(const RunnerFactory& factory, const BucketSpec& spec, bool deficient,
                Digest& digest) {
  const std::unique_ptr<StageRunner> runner = factory.make();
  DeviceBucket bucket(*runner, spec);
  Values p = exact_values(bucket.bucket.p_numel, 1);
  for (size_t i = 0; deficient && i < p.size(); i += 3) p[i] = 0;
  p.back() = 0;  // the count of elements that are not finite
  bucket.p_payload->set(p);
  bucket.q_payload->set(exact_values(bucket.bucket.q_numel, 2));
  bucket.bucket.output_scale = 1.0 / 3;
  for (const Stage stage : {Stage::kRandomStart, Stage::kOrthogonalize, Stage::kReconstruct}) {
    bucket.run(stage);
    digest.add(bucket.state_bytes());
  }
  ASSERT_EQ(bucket.state().skipped, 0);
}

TEST(KnownBits, OfStages) {
  const std::vector<Part> parts = {
      {600, 70, 4}, Part::raw(1001), {33, 300, 5}, {210, 9, 3}, {90, 140, 36}};
  const std::vector<std::pair<DType, uint64_t>> digests = {{DType::kFloat32, 0x1F5895C3B99B7002},
                                                           {DType::kBFloat16, 0x3C85A1EA8223C508},
                                                           {DType::kFloat16, 0xA9E4CB1BEA03F1DF},
                                                           {DType::kFloat64, 0xB92386B2C92C5ADC}};
  for (const RunnerFactory& factory : stage_runners()) {
    for (const auto& [dtype, expected] : digests) {
      Digest digest;
      for (const bool deficient : {false, true}) {
        add_stages(factory, {parts, dtype, dtype}, deficient, digest);
      }
      EXPECT_EQ(digest.value(), expected) << factory.name << ": " << to_string(dtype);
    }
  }
}

TEST(KnownBits, OfPackets) {
  const std::vector<std::pair<WireDType, uint64_t>> digests = {
      {WireDType::kInt8, 0x4B1B43377F385529},
      {WireDType::kInt4, 0x695121DA54CCBEE6},
      {WireDType::kBFloat16, 0x6AB8CEC7F7F45370},
      {WireDType::kFloat16, 0x32FBCAA4836ABDE6},
      {WireDType::kFloat32, 0x9B595EB5464F9176}};
  for (const RunnerFactory& factory : stage_runners()) {
    for (const auto& [wire, expected] : digests) {
      Digest digest;
      for (const PacketSpec& spec : packet_specs()) {
        if (spec.wire != wire) continue;
        const std::unique_ptr<StageRunner> runner = factory.make();
        const AllPackets all = all_packets(*runner, spec, {3, true});
        for (size_t rank = 0; rank < all.size(); ++rank) {
          all[rank]->set_payload(exact_values(all[rank]->numel(), rank));
          all[rank]->run(PacketStage::kQuantize);
        }
        sum(all);
        for (const auto& rank : all) digest.add(rank->payload->bytes());
      }
      EXPECT_EQ(digest.value(), expected) << factory.name << ": " << to_string(wire);
    }
  }
}

}  // namespace
}  // namespace powersgd::test
