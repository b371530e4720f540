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

// The wire, the host of each rank and the schedule.
using Wire = std::optional<WireDType>;
using Hosts = std::vector<int>;
using Case = std::tuple<Wire, Hosts, Schedule>;

class Exchange : public testing::TestWithParam<Case> {
 protected:
  // Runs `fn` on every rank.
  static void run(const std::function<void(Rank&, test::ThreadBackend&)>& fn) {
    test::run_ranks(size(), [&](int rank, const c10::intrusive_ptr<test::ThreadBackend>& backend) {
      const Ranks ranks{rank, size(), /*backend_sums=*/false, schedule(), levels_of(hosts(), rank)};
      Rank self(test::compressing(3, std::get<0>(GetParam())), ranks, *backend);
      fn(self, *backend);
    });
  }
  static const Hosts& hosts() { return std::get<1>(GetParam()); }
  static Schedule schedule() { return std::get<2>(GetParam()); }
  static int size() { return static_cast<int>(hosts().size()); }
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
      const at::Tensor raw = raw_part(self.plan, output), mean_of_raw = raw_part(self.plan, mean);
      if (levels_of(hosts(), 0)) {  // which adds the sums of the hosts
        EXPECT_LT(test::relative(raw, mean_of_raw), 1e-6);
      } else {
        EXPECT_TRUE(at::equal(raw, mean_of_raw)) << "not the bits of an all-reduce";
      }
      sent += output;
      gradients += mean;
    }
    EXPECT_LT(test::relative(sent + self.mean_residual(), gradients), 1e-5);
    // Without the residual the identity fails by far.
    EXPECT_GT(test::relative(sent, gradients), 0.1);
  });
}

// In two levels, a sum has an all-to-all and a gather within the hosts, which carry slices in
// float32, and in between those of its schedule. So a host sends to the others as much as a rank
// does that has a host of its own.
void expect_two_levels(const Rank& self, test::ThreadBackend& backend, const Levels& levels,
                       Schedule schedule, bool in_packets) {
  const int64_t hosts = levels.across.count(), devices = levels.within.count();
  const size_t across = schedule == Schedule::kOneShot ? 1 : 2;
  std::vector<std::vector<test::ThreadBackend::Call>> blocks(1);
  for (const auto& call : backend.calls()) {
    if (call.operation == "send") blocks.back().push_back(call);
    if (call.operation == "endCoalescing") blocks.emplace_back();
  }
  blocks.pop_back();
  ASSERT_EQ(blocks.size(), 2 * (2 + across));
  int64_t sent = 0;  // to other hosts, in bytes
  for (size_t i = 0; i < blocks.size(); ++i) {
    const size_t number = i % (2 + across);
    const bool is_within = number == 0 || number == 1 + across;
    EXPECT_EQ(static_cast<int64_t>(blocks[i].size()), (is_within ? devices : hosts) - 1);
    for (const auto& call : blocks[i]) {
      EXPECT_EQ(call.dtype, is_within || !in_packets ? at::kFloat : at::kByte);
      const int64_t numel = i < 2 + across ? self.plan.p_numel : self.plan.q_numel;
      const int64_t slice = (numel + hosts * devices - 1) / (hosts * devices) * hosts;
      if (is_within) {
        EXPECT_EQ(call.numel, slice);
      } else {
        sent += call.numel * (in_packets ? 1 : 4);
      }
    }
  }
  at::Tensor of_all = at::full({1}, sent, at::kLong);
  std::vector<at::Tensor> sum = {of_all};
  backend.allreduce(sum)->wait();
  const int64_t bytes = (hosts - 1) * self.compressor->payload_bytes();
  EXPECT_EQ(of_all.item<int64_t>() / hosts,
            schedule == Schedule::kOneShot ? bytes : 2 * bytes / hosts);
}

// The bytes of packets follow from the groups of 64 elements. Elements are cut into equal chunks.
TEST_P(Exchange, RunsTheCollectivesOfItsSchedule) {
  run([](Rank& self, test::ThreadBackend& backend) {
    at::Tensor gradient = self.gradient_of(backend.getRank(), 0);
    self.exchange(gradient, 0);
    const Wire wire = std::get<0>(GetParam());
    if (const auto levels = levels_of(hosts(), backend.getRank())) {
      return expect_two_levels(self, backend, *levels, schedule(), wire.has_value());
    }
    const int32_t chunks = schedule() == Schedule::kOneShot ? 1 : size();
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
  const auto& [wire, hosts, schedule] = info.param;
  std::string name = test::name_of(wire) + "_on";
  for (const int host : hosts) name += "_" + std::to_string(host);
  return name + (schedule == Schedule::kOneShot ? "_one_shot" : "_two_shot");
}

INSTANTIATE_TEST_SUITE_P(
    Wires, Exchange,
    testing::Combine(testing::Values(Wire(), Wire(WireDType::kBFloat16), Wire(WireDType::kInt8),
                                     Wire(WireDType::kInt4)),
                     testing::Values(Hosts{0, 1}, Hosts{0, 0, 1},  // unequal
                                     Hosts{0, 1, 2, 3}, Hosts{0, 1, 2, 3, 4, 5, 6, 7, 8},
                                     Hosts{0, 0, 1, 1}, Hosts{0, 1, 0, 1, 0, 1, 0, 1},
                                     Hosts{7, 5, 2, 5, 2, 7}),
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
