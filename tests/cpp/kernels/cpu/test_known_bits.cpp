// SPDX-License-Identifier: BSD-3-Clause
//
// What all ranks must agree on has the same bits on every processor, because the ranks of a job may
// run on several kinds. test_reproducible.cpp compares the instruction sets of one machine; the
// digests here compare machines. Only a change that is meant to change these bits changes them.
#include <gtest/gtest.h>

#include <algorithm>
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

// With every third element of P zero, columns are dead. A row of each Q is zero as well then.
void add_stages(const RunnerFactory& factory, const BucketSpec& spec, bool deficient,
                Digest& digest) {
  const std::unique_ptr<StageRunner> runner = factory.make();
  DeviceBucket bucket(*runner, spec);
  Values p = exact_values(bucket.bucket.p_numel, 1);
  for (size_t i = 0; deficient && i < p.size(); i += 3) p[i] = 0;
  p.back() = 0;  // the count of elements that are not finite
  bucket.p_payload->set(p);
  Values q = exact_values(bucket.bucket.q_numel, 2);
  for (const DeviceMatrix& matrix : bucket.matrices) {
    const auto row = q.begin() + matrix.q_offset;
    if (deficient) std::fill(row, row + matrix.part.cols, 0);
  }
  bucket.q_payload->set(q);
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
  struct Expected {
    DType dtype;
    uint64_t of_full_rank, of_deficient;
  };
  const std::vector<Expected> digests = {{DType::kFloat32, 0x484A1259E353DDA9, 0xDA6F5F4D811D8C48},
                                         {DType::kBFloat16, 0xC0F51FE1BDB389BE, 0xCFA1862D93185B9F},
                                         {DType::kFloat16, 0x19DD97864449E80F, 0x836BF626303AB7D4}};
  for (const RunnerFactory& factory : stage_runners()) {
    for (const Expected& expected : digests) {
      const bool is_half = expected.dtype == DType::kFloat16;
      const BucketSpec spec{parts, expected.dtype, is_half ? DType::kBFloat16 : expected.dtype};
      for (const bool deficient : {false, true}) {
        Digest digest;
        add_stages(factory, spec, deficient, digest);
        EXPECT_EQ(digest.value(), deficient ? expected.of_deficient : expected.of_full_rank)
            << std::hex << digest.value() << std::dec << " on " << factory.name << ": "
            << to_string(spec.gradient_dtype) << (deficient ? ", deficient" : "");
      }
    }
  }
}

TEST(KnownBits, OfPackets) {
  const std::vector<std::pair<WireDType, uint64_t>> digests = {
      {WireDType::kInt8, 0x9C0BDE7DB9D12F37},
      {WireDType::kInt4, 0x1E78AD96097F6C9C},
      {WireDType::kBFloat16, 0x1DC7F256CFA64A18}};
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
