// SPDX-License-Identifier: BSD-3-Clause
//
// Payloads that travel straight to the ranks that add them, with ranks as threads.
#include "group/exchange.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "compressor/payloads.h"
#include "engine/backend_channel.h"
#include "group/compressed_step.h"
#include "group/sessions.h"
#include "ranks/one_rank.h"
#include "ranks/thread_ranks.h"
#include "support/hook_defaults.h"
#include "support/random.h"

namespace powersgd {
namespace {

constexpr uint64_t kSteps = 8;
constexpr uint64_t kBadStep = 3;
// Several groups and incomplete ones, in a vector as in the raw segments.
const std::vector<ParameterShape> kShapes = {
    {{150, 70}, {}}, {{130}, {}}, {{17, 33}, {}}, {{40, 65}, {}}, {{7}, {}}};

at::Tensor raw_part(const BucketPlan& plan, const at::Tensor& gradient) {
  std::vector<at::Tensor> parts;
  for (const PlannedRaw& raw : plan.raw) {
    parts.push_back(gradient.narrow(0, raw.gradient_offset, raw.numel));
  }
  return at::cat(parts);
}

// One rank of a group, which exchanges its payloads with the others.
class Rank : public test::OneRank {
 public:
  Rank(const Options& options, Ranks ranks, c10d::Backend& backend)
      : OneRank(options, at::kFloat, at::kCPU, ranks, kShapes),
        ranks_(ranks),
        channel_(backend, test::kDefaultTimeout) {}

  at::Tensor gradient_of(int rank, uint64_t step) const {
    return test::random(1000 * step + static_cast<uint64_t>(rank), {plan.gradient_numel});
  }
  // In the order in which the ranks are added.
  at::Tensor sum_of_gradients(uint64_t step) const {
    at::Tensor sum = gradient_of(0, step);
    for (int rank = 1; rank < ranks_.count; ++rank) sum += gradient_of(rank, step);
    return sum;
  }

  // Makes the gradient the output.
  void exchange(at::Tensor& gradient, uint64_t step) {
    const Job job = compressed_step(compressor, gradient, {1.0 / ranks_.count, 1, step},
                                    std::make_shared<Stats>(), nullptr);
    for (const auto& part : job.parts) part(channel_);
  }

  // Returns the mean of the residuals over the ranks, in the layout of the gradient.
  at::Tensor mean_residual() {
    at::Tensor all = residuals();
    channel_.allreduce(all);
    return all / ranks_.count;
  }

 private:
  const Ranks ranks_;
  BackendChannel channel_;
};

// The wire, the number of ranks and the schedule.
using Wire = std::optional<WireDType>;
using Case = std::tuple<Wire, int, Schedule>;

class Exchange : public testing::TestWithParam<Case> {
 protected:
  // Runs `fn` on every rank.
  static void run(const std::function<void(Rank&, test::ThreadBackend&)>& fn) {
    test::run_ranks(size(), [&](int rank, const c10::intrusive_ptr<test::ThreadBackend>& backend) {
      const Ranks ranks{rank, size(), /*backend_sums=*/false, std::get<2>(GetParam())};
      Rank self(test::compressing(3, std::get<0>(GetParam())), ranks, *backend);
      fn(self, *backend);
    });
  }
  static int size() { return std::get<1>(GetParam()); }
};

// A step that is not finite on one rank is lost on all, and nothing else is.
TEST_P(Exchange, OutputsAreEqualAndAddUpWithTheResiduals) {
  run([](Rank& self, test::ThreadBackend& backend) {
    at::Tensor sent = at::zeros({self.plan.gradient_numel}, at::kDouble);
    at::Tensor gradients = at::zeros_like(sent);
    for (uint64_t step = 0; step < kSteps; ++step) {
      SCOPED_TRACE("rank " + std::to_string(backend.getRank()));
      at::Tensor output = self.gradient_of(backend.getRank(), step);
      const bool is_bad = step == kBadStep;
      if (is_bad && backend.getRank() == 1) {
        output[150 * 70 + 4] = std::numeric_limits<float>::infinity();  // in a raw segment
        output[2] = std::numeric_limits<float>::quiet_NaN();
      }
      self.exchange(output, step);
      EXPECT_EQ(output.isnan().any().item<bool>(), is_bad);
      EXPECT_EQ(output.isnan().all().item<bool>(), is_bad);
      if (is_bad) continue;
      std::vector<at::Tensor> of_first = {output.clone()};
      backend.broadcast(of_first)->wait();
      EXPECT_TRUE(at::equal(output, of_first[0]));
      const at::Tensor mean = self.sum_of_gradients(step) * (1.0 / size());
      EXPECT_TRUE(at::equal(raw_part(self.plan, output), raw_part(self.plan, mean)))
          << "not the bits of an all-reduce";
      sent += output;
      gradients += mean;
    }
    EXPECT_LT(test::relative(sent + self.mean_residual(), gradients), 1e-5);
    // Without the residual the identity fails by far.
    EXPECT_GT(test::relative(sent, gradients), 0.1);
  });
}

// The bytes of packets follow from the groups of 64 elements. Elements are cut into equal chunks.
TEST_P(Exchange, RunsTheCollectivesOfItsSchedule) {
  run([](Rank& self, test::ThreadBackend& backend) {
    at::Tensor gradient = self.gradient_of(backend.getRank(), 0);
    self.exchange(gradient, 0);
    const Wire wire = std::get<0>(GetParam());
    const int32_t chunks = std::get<2>(GetParam()) == Schedule::kOneShot ? 1 : size();
    std::vector<int64_t> of_a_chunk;  // of P and Q
    if (wire) {
      const int64_t p_groups = 3 * (3 + 1 + 1), q_groups = 3 * (2 + 1 + 2);
      of_a_chunk = {
          kernels::packet_layout(chunks, *wire, p_groups, DType::kFloat32, 130 + 7, 3 + 1)
              .chunk_bytes,
          kernels::packet_layout(chunks, *wire, q_groups, DType::kFloat32, 0, 0).chunk_bytes};
    } else {
      for (const int64_t numel : {self.plan.p_numel, self.plan.q_numel}) {
        of_a_chunk.push_back((numel + chunks - 1) / chunks);
      }
    }
    std::vector<std::pair<std::string, int64_t>> expected, calls;
    for (const int64_t numel : of_a_chunk) {
      if (chunks > 1) expected.emplace_back("alltoall_base", chunks * numel);
      expected.emplace_back("_allgather_base", numel);
    }
    for (const auto& call : backend.calls()) {
      EXPECT_EQ(call.dtype, wire ? at::kByte : at::kFloat);
      calls.emplace_back(call.operation, call.numel);
    }
    EXPECT_EQ(calls, expected);
  });
}

std::string name_of_exchange(const testing::TestParamInfo<Case>& info) {
  const auto& [wire, size, schedule] = info.param;
  return test::name_of(wire) + "_" + std::to_string(size) +
         (schedule == Schedule::kOneShot ? "_one_shot" : "_two_shot");
}

INSTANTIATE_TEST_SUITE_P(Wires, Exchange,
                         testing::Combine(testing::Values(Wire(), Wire(WireDType::kBFloat16),
                                                          Wire(WireDType::kInt8),
                                                          Wire(WireDType::kInt4)),
                                          testing::Values(2, 3, 4, 9),
                                          testing::Values(Schedule::kOneShot, Schedule::kTwoShot)),
                         name_of_exchange);

// A step waits for two exchanges, whatever the number of buckets and ranks: the network delivers
// what it holds once every bucket of every rank has sent its packets.
TEST(ExchangesOfAStep, FollowEachOtherOnceForEachPayload) {
  constexpr size_t kBuckets = 5;
  for (const int size : {2, 3, 8, 16}) {
    for (const Schedule schedule : {Schedule::kOneShot, Schedule::kTwoShot}) {
      const Options options = test::compressing(4, WireDType::kInt8);
      std::vector<at::Tensor> outputs(static_cast<size_t>(size));
      test::run_with_engines(size, [&](int rank, InnerAndConnect inner, const auto& engines) {
        const auto session =
            std::make_shared<Session>(rank, size, std::vector{inner}, options, LogSink());
        std::vector<std::unique_ptr<test::OneRank>> buckets;
        for (size_t i = 0; i < kBuckets; ++i) {
          Ranks ranks = session->ranks_on(at::kCPU);
          ranks.schedule = schedule;
          buckets.push_back(
              std::make_unique<test::OneRank>(options, at::kFloat, at::kCPU, ranks, kShapes));
        }
        test::ThreadGroup& network = engines[0]->group();
        network.hold_messages();
        std::vector<at::Tensor> gradients;
        for (uint64_t step = 0; step < 2; ++step) {
          std::vector<Session::WorkPtr> works;
          for (const auto& bucket : buckets) {
            gradients.push_back(
                test::random(step + static_cast<uint64_t>(rank), {bucket->plan.gradient_numel}));
            works.push_back(session->allreduce_compressed(bucket->compressor, gradients.back(),
                                                          {1.0 / size, 1, step}, session->stats()));
          }
          const int rounds = schedule == Schedule::kOneShot ? 2 : 4;
          for (int round = 0; round < rounds && rank == 0; ++round) {
            network.deliver(kBuckets * static_cast<size_t>(size * (size - 1)),
                            test::kDefaultTimeout);
          }
          for (const auto& work : works) work->wait();
        }
        outputs[static_cast<size_t>(rank)] = at::cat(gradients);
      });
      for (const at::Tensor& output : outputs) EXPECT_TRUE(at::equal(output, outputs[0]));
    }
  }
}

}  // namespace
}  // namespace powersgd
