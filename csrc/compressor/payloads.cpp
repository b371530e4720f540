// SPDX-License-Identifier: BSD-3-Clause
#include "compressor/payloads.h"

#include <ATen/ATen.h>

#include <utility>

#include "compressor/bucket_tables.h"

namespace powersgd {
namespace {

// With W packets of S bytes, one-shot sends (W - 1) S and two-shot 2 (W - 1) / W S. At 1 Gbit/s
// this many bytes take half a millisecond, about as long as another exchange.
constexpr int64_t kWorthAnExchange = 64 * 1024;

// The bytes that arrive and, two-shot, that are gathered and reduced, if each rank sends `bytes`.
int64_t bytes_to_receive(Schedule schedule, int64_t ranks, int64_t bytes) {
  if (ranks == 1) return 0;
  return schedule == Schedule::kOneShot ? ranks * bytes : 2 * bytes + bytes / ranks;
}

PayloadPlan plan_elements(const BucketSpec& spec, int64_t numel) {
  const Ranks& ranks = spec.ranks;
  const int64_t width = size_of(DType::kFloat32);
  PayloadPlan plan{numel};
  if (!ranks.backend_sums) plan.schedule = choose_schedule(ranks, numel * width);
  if (plan.schedule == Schedule::kTwoShot) {
    plan.chunk_numel = (numel + ranks.count - 1) / ranks.count;
  }
  plan.wire_bytes = plan.padded_numel(ranks.count) * width;
  if (plan.schedule != Schedule::kAllreduce) {
    plan.buffer_bytes = bytes_to_receive(plan.schedule, ranks.count, plan.wire_bytes);
  }
  return plan;
}

PayloadPlan plan_packets(const BucketSpec& spec, int64_t numel, int64_t groups, int64_t raw_numel,
                         int64_t flags) {
  const Ranks& ranks = spec.ranks;
  const auto layout_of = [&](int32_t chunks) {
    const DType raw_dtype = kernels::raw_dtype_of(to_dtype(spec.gradient_type));
    return kernels::packet_layout(chunks, *spec.options.wire_dtype, groups, raw_dtype, raw_numel,
                                  flags);
  };
  PayloadPlan plan{numel};
  plan.in_packets = true;
  plan.layout = layout_of(1);
  plan.schedule = choose_schedule(ranks, plan.layout.bytes());
  if (plan.schedule == Schedule::kTwoShot) plan.layout = layout_of(ranks.count);
  plan.wire_bytes = plan.layout.bytes();
  plan.buffer_bytes =
      plan.wire_bytes + bytes_to_receive(plan.schedule, ranks.count, plan.wire_bytes);
  return plan;
}

// What both kinds of payloads share: buffers for what is sent and what arrives.
class Buffered : public Payload {
 public:
  // `sent` is what this rank sends, `buffers` the memory for all that arrives or is computed from
  // it.
  Buffered(const PayloadPlan& plan, const at::Tensor& elements, at::Tensor sent,
           const at::Tensor& buffers, int64_t ranks)
      : schedule_(plan.schedule),
        elements_(elements.narrow(0, 0, plan.numel)),
        sent_(std::move(sent)) {
    if (schedule_ == Schedule::kAllreduce) return;
    received_ = sent_;
    if (ranks == 1) return;
    const int64_t size = sent_.numel();
    received_ = buffers.narrow(0, 0, schedule_ == Schedule::kOneShot ? ranks * size : size);
    if (schedule_ == Schedule::kOneShot) return;
    gathered_ = buffers.narrow(0, size, size);
    reduced_ = buffers.narrow(0, 2 * size, size / ranks);
  }

  Schedule schedule() const override { return schedule_; }
  at::Tensor& elements() override { return elements_; }
  at::Tensor& sent() override { return sent_; }
  at::Tensor& received() override { return received_; }
  at::Tensor& gathered() override { return gathered_; }
  at::Tensor& reduced() override { return reduced_; }

 private:
  const Schedule schedule_;
  at::Tensor elements_, sent_, received_, gathered_, reduced_;
};

// Elements, which every rank adds in the order of the ranks, so all get the same bits.
class ElementsPayload final : public Buffered {
 public:
  ElementsPayload(const PayloadPlan& plan, const at::Tensor& elements, int64_t ranks)
      : Buffered(plan, elements, elements,
                 at::empty({plan.buffer_bytes / static_cast<int64_t>(elements.element_size())},
                           elements.options()),
                 ranks),
        ranks_(ranks) {}

  void quantize() override {}
  void requantize() override { add(reduced()); }
  void dequantize() override {
    if (ranks_ == 1) return;
    if (schedule() == Schedule::kOneShot) return add(elements());
    elements().copy_(gathered().narrow(0, 0, elements().numel()));
  }

 private:
  void add(at::Tensor& sum) {
    const at::Tensor terms = received().view({ranks_, -1});
    sum.copy_(terms[0]);
    for (int64_t rank = 1; rank < ranks_; ++rank) sum.add_(terms[rank]);
  }

  const int64_t ranks_;
};

class PacketPayload final : public Buffered {
 public:
  PacketPayload(const PayloadPlan& plan, const at::Tensor& elements,
                const kernels::Packets& packets, const Stages& stages)
      : PacketPayload(plan, elements, packets, stages,
                      at::empty({plan.buffer_bytes}, elements.options().dtype(at::kByte))) {}

  void quantize() override { stages_.quantize(packets_); }
  void requantize() override { stages_.requantize(packets_); }
  void dequantize() override {
    kernels::Packets packets = packets_;
    if (schedule() == Schedule::kTwoShot) packets.sent = bytes_of(gathered());
    stages_.dequantize(packets);
  }

 private:
  PacketPayload(const PayloadPlan& plan, const at::Tensor& elements,
                const kernels::Packets& packets, const Stages& stages, const at::Tensor& buffers)
      : Buffered(plan, elements, buffers.narrow(0, 0, plan.wire_bytes),
                 buffers.narrow(0, plan.wire_bytes, plan.buffer_bytes - plan.wire_bytes),
                 packets.ranks),
        packets_(packets),
        stages_(stages) {
    packets_.layout = plan.layout;
    packets_.payload = elements.data_ptr();
    packets_.sent = bytes_of(sent());
    packets_.received = bytes_of(received());
    packets_.reduced = reduced().defined() ? bytes_of(reduced()) : nullptr;
  }

  static uint8_t* bytes_of(const at::Tensor& buffer) {
    return static_cast<uint8_t*>(buffer.data_ptr());
  }

  kernels::Packets packets_;
  const Stages& stages_;
};

}  // namespace

Schedule choose_schedule(const Ranks& ranks, int64_t bytes) {
  if (ranks.count == 1) return Schedule::kOneShot;
  const int64_t extra = int64_t{ranks.count - 1} * (ranks.count - 2) * bytes / ranks.count;
  const Schedule shorter = extra <= kWorthAnExchange ? Schedule::kOneShot : Schedule::kTwoShot;
  return ranks.schedule.value_or(shorter);
}

PayloadPlans plan_payloads(const BucketSpec& spec) {
  const BucketPlan& plan = spec.plan;
  if (!spec.options.wire_dtype) {
    return {plan_elements(spec, plan.p_numel), plan_elements(spec, plan.q_numel)};
  }
  const std::vector<kernels::Matrix> matrices = matrices_without_states(plan);
  return {plan_packets(spec, plan.p_numel, kernels::p_packet_factors(matrices).groups,
                       plan.raw_numel(), plan.p_numel - plan.counts_offset()),
          plan_packets(spec, plan.q_numel, kernels::q_packet_factors(matrices).groups, 0, 0)};
}

std::unique_ptr<Payload> make_payload(const PayloadPlan& plan, const at::Tensor& elements,
                                      const kernels::Packets& packets, const Stages& stages) {
  if (plan.in_packets) {
    return std::make_unique<PacketPayload>(plan, elements, packets, stages);
  }
  return std::make_unique<ElementsPayload>(plan, elements, packets.ranks);
}

}  // namespace powersgd
