// SPDX-License-Identifier: BSD-3-Clause
#include "compressor/payloads.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "compressor/bucket_tables.h"

namespace powersgd {
namespace {

// With W packets of S bytes, one-shot sends (W - 1) S and two-shot 2 (W - 1) / W S. At 1 Gbit/s
// this many bytes take half a millisecond, about as long as another exchange.
constexpr int64_t kWorthAnExchange = 64 * 1024;

// The bytes that arrive and, two-shot, that are gathered and reduced, if each rank sends `bytes`.
int64_t bytes_to_receive(Schedule schedule, int64_t ranks, int64_t bytes) {
  if (ranks == 1 || schedule == Schedule::kAllreduce) return 0;
  return schedule == Schedule::kOneShot ? ranks * bytes : 2 * bytes + bytes / ranks;
}

// A payload, as packets see it: [ factors | raw segments | flags ].
struct Contents {
  kernels::PacketFactors factors;
  int64_t raw_begin, flags_begin, numel;
};

// Plans the levels and the schedule of a payload of `bytes` bytes.
PayloadPlan plan_route(const Ranks& ranks, int64_t numel, int64_t bytes) {
  PayloadPlan plan{numel, numel};
  plan.end = numel;
  plan.own = ranks.own;
  plan.peers = ranks.count;
  if (ranks.levels && (ranks.schedule || takes_two_levels(*ranks.levels, bytes))) {
    const Members &within = ranks.levels->within, &across = ranks.levels->across;
    plan.levels = ranks.levels;
    plan.own = across.own;
    plan.peers = across.count();
    const int64_t parts = int64_t{within.count()} * across.count();
    plan.padded_numel = (numel + parts - 1) / parts * parts;
    plan.begin = std::min(numel, within.own * plan.slice_numel());
    plan.end = std::min(numel, plan.begin + plan.slice_numel());
  }
  plan.schedule = choose_schedule(plan.peers, bytes);
  if (ranks.schedule && plan.peers > 1) plan.schedule = *ranks.schedule;
  return plan;
}

PayloadPlan plan_elements(const BucketSpec& spec, int64_t numel) {
  const Ranks& ranks = spec.ranks;
  const int64_t width = size_of(DType::kFloat32);
  PayloadPlan plan{numel, numel};
  if (!ranks.backend_sums) plan = plan_route(ranks, numel, numel * width);
  if (!plan.levels && plan.schedule == Schedule::kTwoShot) {
    plan.padded_numel = (numel + ranks.count - 1) / ranks.count * ranks.count;
  }
  plan.wire_bytes = plan.padded_numel * width;
  plan.sent_bytes = plan.levels ? plan.slice_numel() * width : plan.wire_bytes;
  plan.buffer_bytes = bytes_to_receive(plan.schedule, plan.peers, plan.sent_bytes);
  return plan;
}

PayloadPlan plan_packets(const BucketSpec& spec, const Contents& contents) {
  const auto layout_of = [&](int64_t begin, int64_t end, int32_t chunks) {
    const auto overlap = [&](int64_t from, int64_t to) {
      return std::max<int64_t>(0, std::min(end, to) - std::max(begin, from));
    };
    return kernels::packet_layout(chunks, *spec.options.wire_dtype,
                                  kernels::slice_of(contents.factors, begin, end).groups,
                                  kernels::raw_dtype_of(to_dtype(spec.gradient_type)),
                                  overlap(contents.raw_begin, contents.flags_begin),
                                  overlap(contents.flags_begin, contents.numel));
  };
  const int64_t numel = contents.numel;
  PayloadPlan plan = plan_route(spec.ranks, numel, layout_of(0, numel, 1).bytes());
  const int32_t chunks = plan.schedule == Schedule::kTwoShot ? plan.peers : 1;
  plan.in_packets = true;
  plan.layout = layout_of(plan.begin, plan.end, chunks);
  plan.raw_offset = std::clamp(contents.raw_begin, plan.begin, plan.end);
  plan.sent_bytes = plan.layout.bytes();
  for (int64_t begin = 0; begin < numel; begin += plan.slice_numel()) {
    plan.wire_bytes +=
        layout_of(begin, std::min(numel, begin + plan.slice_numel()), chunks).bytes();
  }
  plan.buffer_bytes =
      plan.sent_bytes + bytes_to_receive(plan.schedule, plan.peers, plan.sent_bytes);
  return plan;
}

// Sums rows in their order, so all ranks that have equal rows get the same bits.
void add_rows(const at::Tensor& rows, at::Tensor& sum) {
  sum.copy_(rows[0]);
  for (int64_t row = 1; row < rows.size(0); ++row) sum.add_(rows[row]);
}

std::optional<HostSum> host_sum(const PayloadPlan& plan, const at::Tensor& elements) {
  if (!plan.levels) return std::nullopt;
  const Members& within = plan.levels->within;
  const at::Tensor slices = elements.view({within.count(), -1});
  return HostSum{plan.levels, elements, at::empty_like(slices), slices[within.own]};
}

// What both kinds of payloads share: buffers for what is sent and what arrives.
class Buffered : public Payload {
 public:
  // `sent` is what this rank sends, `buffers` the memory for all that arrives or is computed from
  // it.
  Buffered(const PayloadPlan& plan, const at::Tensor& elements, std::optional<HostSum> host,
           at::Tensor sent, const at::Tensor& buffers)
      : schedule_(plan.schedule),
        host_(std::move(host)),
        elements_(elements.narrow(0, 0, plan.numel)),
        sent_(std::move(sent)) {
    if (schedule_ == Schedule::kAllreduce) return;
    received_ = sent_;
    if (plan.peers == 1) return;
    const int64_t size = sent_.numel();
    received_ = buffers.narrow(0, 0, schedule_ == Schedule::kOneShot ? plan.peers * size : size);
    if (schedule_ == Schedule::kOneShot) return;
    gathered_ = buffers.narrow(0, size, size);
    reduced_ = buffers.narrow(0, 2 * size, size / plan.peers);
  }

  Schedule schedule() const override { return schedule_; }
  HostSum* host() override { return host_ ? &*host_ : nullptr; }
  at::Tensor& elements() override { return elements_; }
  at::Tensor& sent() override { return sent_; }
  at::Tensor& received() override { return received_; }
  at::Tensor& reduced() override { return reduced_; }
  at::Tensor& gathered() override { return gathered_; }

 private:
  const Schedule schedule_;
  std::optional<HostSum> host_;
  at::Tensor elements_, sent_, received_, gathered_, reduced_;
};

// Elements, which every rank adds in the order of the ranks.
class ElementsPayload final : public Buffered {
 public:
  ElementsPayload(const PayloadPlan& plan, const at::Tensor& elements)
      : ElementsPayload(plan, elements, host_sum(plan, elements)) {}

  void quantize() override {}
  void requantize() override { add(reduced()); }
  void dequantize() override {
    if (peers_ == 1) return;
    if (schedule() == Schedule::kOneShot) return add(sent());
    sent().copy_(gathered());
  }

 private:
  ElementsPayload(const PayloadPlan& plan, const at::Tensor& elements, std::optional<HostSum> host)
      : Buffered(plan, elements, host, host ? host->slice : elements,
                 at::empty({plan.buffer_bytes / static_cast<int64_t>(elements.element_size())},
                           elements.options())),
        peers_(plan.peers) {}

  void add(at::Tensor& sum) { add_rows(received().view({peers_, -1}), sum); }

  const int64_t peers_;
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
      : Buffered(plan, elements, host_sum(plan, elements), buffers.narrow(0, 0, plan.sent_bytes),
                 buffers.narrow(0, plan.sent_bytes, plan.buffer_bytes - plan.sent_bytes)),
        packets_(packets),
        stages_(stages) {
    packets_.layout = plan.layout;
    packets_.payload = elements.data_ptr();
    packets_.raw_offset = plan.raw_offset;
    packets_.ranks = plan.peers;
    packets_.own_chunk = plan.own;
    packets_.of_host = plan.levels != nullptr;
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

void HostSum::add() { add_rows(terms, slice); }

Schedule choose_schedule(int64_t ranks, int64_t bytes) {
  if (ranks == 1) return Schedule::kOneShot;
  const int64_t extra = (ranks - 1) * (ranks - 2) * bytes / ranks;
  return extra <= kWorthAnExchange ? Schedule::kOneShot : Schedule::kTwoShot;
}

// One-shot, D ranks of a host send packets to D ranks of each other host: D * D times as much.
bool takes_two_levels(const Levels& levels, int64_t bytes) {
  const int64_t devices = levels.within.count(), other_hosts = levels.across.count() - 1;
  return (devices * devices - 1) * other_hosts * bytes > kWorthAnExchange;
}

PayloadPlans plan_payloads(const BucketSpec& spec) {
  const BucketPlan& plan = spec.plan;
  if (!spec.options.wire_dtype) {
    return {plan_elements(spec, plan.p_numel), plan_elements(spec, plan.q_numel)};
  }
  const std::vector<kernels::Matrix> matrices = matrices_without_states(plan);
  return {plan_packets(spec, {kernels::p_packet_factors(matrices), plan.raw_offset(),
                              plan.counts_offset(), plan.p_numel}),
          plan_packets(spec, {kernels::q_packet_factors(matrices), plan.q_numel, plan.q_numel,
                              plan.q_numel})};
}

std::unique_ptr<Payload> make_payload(const PayloadPlan& plan, const at::Tensor& elements,
                                      const kernels::Packets& packets, const Stages& stages) {
  if (plan.in_packets) {
    return std::make_unique<PacketPayload>(plan, elements, packets, stages);
  }
  return std::make_unique<ElementsPayload>(plan, elements);
}

}  // namespace powersgd
