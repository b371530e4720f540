// SPDX-License-Identifier: BSD-3-Clause
#include "compressor/bucket_payload.h"

#include <ATen/ATen.h>

#include <utility>

#include "compressor/bucket_tables.h"

namespace powersgd {
namespace {

// With W packets of S bytes, one-shot sends (W - 1) S and two-shot 2 (W - 1) / W S. At 1 Gbit/s
// this many bytes take half a millisecond, about as long as another collective.
constexpr int64_t kWorthACollective = 64 * 1024;

PayloadPlan plan_packets(const BucketSpec& spec, int64_t numel, int64_t groups, int64_t raw_numel,
                         int64_t flags) {
  const Ranks& ranks = spec.ranks;
  const auto layout_of = [&](int32_t chunks) {
    const DType raw_dtype = kernels::raw_dtype_of(to_dtype(spec.gradient_type));
    return kernels::packet_layout(chunks, *spec.packet_dtype(), groups, raw_dtype, raw_numel,
                                  flags);
  };
  PayloadPlan plan{numel};
  plan.layout = layout_of(1);
  plan.schedule = choose_schedule(ranks, plan.layout.bytes());
  if (plan.schedule == Schedule::kTwoShot) plan.layout = layout_of(ranks.count);
  const int64_t bytes = plan.layout.bytes();
  if (ranks.count == 1) {
    plan.buffer_bytes = bytes;
  } else if (plan.schedule == Schedule::kOneShot) {
    plan.buffer_bytes = bytes + ranks.count * bytes;
  } else {
    plan.buffer_bytes = 3 * bytes + plan.layout.chunk_bytes;
  }
  return plan;
}

}  // namespace

Schedule choose_schedule(const Ranks& ranks, int64_t bytes) {
  if (ranks.count == 1) return Schedule::kOneShot;
  const int64_t extra = int64_t{ranks.count - 1} * (ranks.count - 2) * bytes / ranks.count;
  const Schedule shorter = extra <= kWorthACollective ? Schedule::kOneShot : Schedule::kTwoShot;
  return ranks.schedule.value_or(shorter);
}

PayloadPlans plan_payloads(const BucketSpec& spec) {
  const BucketPlan& plan = spec.plan;
  if (!spec.packet_dtype()) return {{plan.p_numel}, {plan.q_numel}};
  const std::vector<kernels::Matrix> matrices = matrices_without_states(plan);
  return {plan_packets(spec, plan.p_numel, kernels::p_packet_factors(matrices).groups,
                       plan.raw_numel(), plan.p_numel - plan.counts_offset()),
          plan_packets(spec, plan.q_numel, kernels::q_packet_factors(matrices).groups, 0, 0)};
}

BucketPayload::BucketPayload(const PayloadPlan& plan, at::Tensor elements,
                             const kernels::Packets& packets, const Stages& stages)
    : plan_(plan),
      elements_(std::move(elements)),
      buffers_(at::empty({plan.buffer_bytes}, elements_.options().dtype(at::kByte))),
      packets_(packets),
      stages_(stages) {
  packets_.layout = plan_.layout;
  packets_.payload = elements_.data_ptr();
  if (schedule() == Schedule::kAllreduce) return;
  packets_.sent = static_cast<uint8_t*>(buffers_.data_ptr());
  packets_.received = static_cast<uint8_t*>(received().data_ptr());
  if (schedule() == Schedule::kTwoShot) {
    packets_.reduced = static_cast<uint8_t*>(reduced().data_ptr());
  }
}

at::Tensor BucketPayload::received() {
  const int64_t bytes = plan_.layout.bytes();
  if (packets_.ranks == 1) return sent();
  return buffer(bytes, schedule() == Schedule::kOneShot ? packets_.ranks * bytes : bytes);
}

at::Tensor BucketPayload::gathered() {
  return buffer(2 * plan_.layout.bytes(), plan_.layout.bytes());
}

at::Tensor BucketPayload::reduced() {
  return buffer(3 * plan_.layout.bytes(), plan_.layout.chunk_bytes);
}

void BucketPayload::dequantize() {
  kernels::Packets packets = packets_;
  if (schedule() == Schedule::kTwoShot) {
    packets.sent = static_cast<uint8_t*>(gathered().data_ptr());
  }
  stages_.dequantize(packets);
}

}  // namespace powersgd
