// SPDX-License-Identifier: BSD-3-Clause
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <stdexcept>
#include <vector>

#include "kernels/cuda/launch.cuh"
#include "kernels/fixtures/device_packets.h"
#include "kernels/fixtures/dtypes.h"
#include "kernels/fixtures/kernel_test.h"
#include "powersgd/kernels/kernels.h"
#include "simt/simt.h"

// The launches of the CUDA kernels, and what they load: figures that a GPU's speed hangs on.

namespace powersgd::test {
namespace {

void no_kernel(int) {}

TEST(Launches, AFailedOneHasANameAndDoesNotStick) {
  using namespace kernels::cuda;
  const size_t too_much = 49 * 1024;  // of shared memory, without asking for more first
  const Status status = launch<no_kernel>(1, too_much, nullptr, Predecessor::kAnything, 0);
  EXPECT_STREQ(error_name(status), "cudaErrorInvalidConfiguration");
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TEST(Launches, NothingIsCaptured) { EXPECT_FALSE(kernels::cuda::is_capturing(nullptr)); }

TEST(Launches, AStepTakesFour) {
  BucketSpec spec{{{70, 300, 20}, Part::raw(9), {4, 17000, 2}, {900, 40, 1}}};
  spec.tells_use = true;
  const auto runner = stage_runners().front().make();
  DeviceBucket bucket(*runner, spec);
  const int64_t before = kernels::cuda::launch_count();
  for (const Stage stage :
       {Stage::kProject, Stage::kOrthogonalize, Stage::kBackProject, Stage::kReconstruct})
    bucket.run(stage);
  EXPECT_EQ(kernels::cuda::launch_count() - before, 4);
}

TEST(Launches, PacketsTakeOnePerFunction) {
  const auto runner = stage_runners().front().make();
  for (const Exchange& exchange : {Exchange{}, {3, true}}) {
    DevicePackets packets(*runner, {{{70, 30, 4}, Part::raw(9)}}, exchange);
    for (const PacketStage stage :
         {PacketStage::kQuantize, PacketStage::kRequantize, PacketStage::kDequantize}) {
      const int64_t before = kernels::cuda::launch_count();
      packets.run(stage);
      EXPECT_EQ(kernels::cuda::launch_count() - before, 1);
    }
  }
}

// A launch has 1024 blocks at most, whose warps then take several batches of groups, and several
// raw elements.
TEST(Launches, PacketsOfMoreThanTheWarpsTakeAtATime) {
  const int64_t numel = int64_t{1024} * kernels::cuda::kThreads * 8 + 1000;
  const auto runner = stage_runners().front().make();
  const PacketSpec spec{{{numel, 1, 1}, Part::raw(300'000)}};
  DevicePackets packets(*runner, spec, {});
  Values values(static_cast<size_t>(packets.numel()));
  for (size_t i = 0; i < values.size() - 3; ++i)  // integers, and the largest of a group is 127
    values[i] = i % kernels::kGroup == 0 ? 127 : static_cast<double>(i * 7 % 255) - 127;
  packets.payload->set(values);
  packets.run(PacketStage::kQuantize);
  EXPECT_EQ(packets.values_sent(), values);
}

// Only back_project follows a kernel of ours in its stream. The others follow a collective or an
// event, which dependent launches are not made for.
TEST(Launches, BackProjectAloneIsDependent) {
  const auto runner = stage_runners().front().make();
  DeviceBucket bucket(*runner, {{{70, 30, 4}, Part::raw(9)}});
  for (const Stage stage : {Stage::kRandomStart, Stage::kProject, Stage::kOrthogonalize,
                            Stage::kBackProject, Stage::kReconstruct}) {
    const int64_t before = simt::dependent_launches;
    bucket.run(stage);
    EXPECT_EQ(simt::dependent_launches - before, stage == Stage::kBackProject ? 1 : 0);
  }
}

// M and the outputs are the same, and only ranks 9 to 32 have such products.
TEST(Launches, Bfloat16ProductsAreThoseOfTwoStages) {
  for (const int64_t rank : {8, 9, 32}) {
    for (const Stage stage : {Stage::kProject, Stage::kBackProject, Stage::kReconstruct}) {
      std::vector<std::vector<uint8_t>> results;
      for (const bool bfloat16_products : {false, true}) {
        const auto runner = stage_runners().front().make();
        BucketSpec spec{{{70, 60, rank}}};
        spec.bfloat16_products = bfloat16_products;
        DeviceBucket bucket(*runner, spec);
        randomize(bucket, 1);
        bucket.q_payload->set(random_values(bucket.bucket.q_numel, 2));
        bucket.run(stage);
        results.push_back(bucket.state_bytes());
        const Values memory = bucket.matrices[0].memory->get();
        results.push_back(encode(DType::kFloat32, memory));
      }
      const bool rounds = rank >= 9 && stage != Stage::kReconstruct;
      EXPECT_EQ(results[0] != results[2], rounds);
      EXPECT_EQ(results[1], results[3]);
    }
  }
}

// What the kernels leave to torch, they refuse.
TEST(Launches, ThereAreNoProductsAboveRank32) {
  const auto runner = stage_runners().front().make();
  DeviceBucket bucket(*runner, {{{90, 700, 33}}});
  EXPECT_FALSE(kernels::cuda::multiplies(bucket.bucket.largest_rank));
  EXPECT_THROW(bucket.run(Stage::kOrthogonalize), std::runtime_error);
  EXPECT_THROW(bucket.run(Stage::kBackProject), std::runtime_error);
}

class FactorLoads : public testing::TestWithParam<int64_t> {};

// project reads q_local and q_warm through asynchronous copies alone. A warp that read them by
// itself for four rows would load 2 * rank bytes for each element of M.
TEST_P(FactorLoads, AreAQuarterOfThoseOfFourRowsAtMost) {
  const int64_t rank = GetParam(), rows = 256, cols = 1024;
  const auto runner = stage_runners().front().make();
  DeviceBucket bucket(*runner, {{{rows, cols, rank}}});
  const int64_t before = simt::async_copied_bytes();
  bucket.run(Stage::kProject);
  const auto bytes = static_cast<double>(simt::async_copied_bytes() - before);
  const double per_element = bytes / static_cast<double>(rows * cols);
  EXPECT_GT(per_element, 0);
  EXPECT_LE(per_element, 2.0 * static_cast<double>(rank) / 4);
  RecordProperty("bytes_per_element", std::to_string(per_element));
}

INSTANTIATE_TEST_SUITE_P(Launches, FactorLoads, testing::Values(1, 2, 3, 4, 8, 16, 32));

}  // namespace
}  // namespace powersgd::test
