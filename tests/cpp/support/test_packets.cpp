// SPDX-License-Identifier: BSD-3-Clause
#include "support/test_packets.h"

#include <algorithm>

#include "support/dtypes.h"

namespace powersgd::test {
namespace {

using kernels::kGroup;

std::string name_of(WireDType dtype) {
  switch (dtype) {
    case WireDType::kFloat32:
      return "float32";
    case WireDType::kBFloat16:
      return "bfloat16";
    case WireDType::kFloat16:
      return "float16";
    case WireDType::kInt8:
      return "int8";
    case WireDType::kInt4:
      return "int4";
  }
  return {};
}

uint8_t* allocate_bytes(StageRunner& runner, int64_t count) {
  return static_cast<uint8_t*>(runner.allocate(static_cast<size_t>(count)));
}

}  // namespace

std::string describe(const PacketSpec& spec) {
  return std::string(spec.is_q ? "q_" : "p_") + to_string(spec.factor_dtype) + "_" +
         name_of(spec.wire);
}

TestPackets::TestPackets(StageRunner& runner, const PacketSpec& packet_spec,
                         const Exchange& ranks_exchange, int32_t own_rank)
    : spec(packet_spec), exchange(ranks_exchange), runner_(runner) {
  std::vector<kernels::Matrix> matrices;
  for (const Part& part : spec.parts) {
    if (part.is_raw()) {
      raw_numel_ += part.numel();
      continue;
    }
    kernels::Matrix matrix{};
    matrix.rows = part.rows;
    matrix.cols = part.cols;
    matrix.rank = part.rank;
    matrix.p_offset = matrix.q_offset = packets.raw_offset;
    if (spec.is_q) {
      q_offsets_.push_back(packets.raw_offset);
      q_locals_.push_back(std::make_unique<DeviceArray>(runner_, spec.factor_dtype,
                                                        part.cols * part.rank, spec.misalignment));
      matrix.q_local = q_locals_.back()->data();
    }
    packets.raw_offset += (spec.is_q ? part.cols : part.rows) * part.rank;
    matrices.push_back(matrix);
  }
  packets.own_chunk = exchange.two_shot ? own_rank : 0;
  allocate(spec.is_q ? kernels::q_packet_factors(matrices) : kernels::p_packet_factors(matrices));
}

void TestPackets::allocate(const kernels::PacketFactors& factors) {
  packets.layout = kernels::packet_layout(exchange.chunks(), spec.wire, factors.groups,
                                          spec.raw_dtype, raw_numel_, spec.flags);
  packets.factor_dtype = spec.factor_dtype;
  packets.raw_dtype = spec.raw_dtype;
  packets.num_factors = static_cast<int32_t>(factors.factors.size());
  packets.ranks = exchange.ranks;

  const size_t bytes = factors.factors.size() * sizeof(kernels::PacketFactor);
  void* table = runner_.allocate(bytes);
  runner_.copy_in(table, factors.factors.data(), bytes);
  packets.factors = static_cast<const kernels::PacketFactor*>(table);
  payload = std::make_unique<DeviceArray>(runner_, spec.factor_dtype, numel(), spec.misalignment);
  packets.payload = payload->data();

  const int64_t sources = exchange.two_shot ? packets.layout.chunk_bytes : packets.layout.bytes();
  packets.sent = allocate_bytes(runner_, packets.layout.bytes());
  packets.received = allocate_bytes(runner_, exchange.ranks * sources);
  packets.reduced = allocate_bytes(runner_, packets.layout.chunk_bytes);
}

std::vector<uint8_t> TestPackets::read(const uint8_t* bytes, int64_t count) const {
  std::vector<uint8_t> values(static_cast<size_t>(count));
  runner_.copy_out(values.data(), bytes, values.size());
  return values;
}

void TestPackets::write(uint8_t* bytes, const std::vector<uint8_t>& values) {
  runner_.copy_in(bytes, values.data(), values.size());
}

void TestPackets::set_payload(Values values) {
  const auto raw = values.begin() + packets.raw_offset;
  for (auto value = raw; value != raw + raw_numel_; ++value) {
    *value = round_to(spec.raw_dtype, *value);
  }
  payload->set(values);
}

Values TestPackets::values_sent() {
  DeviceArray target(runner_, spec.factor_dtype, numel(), spec.misalignment);
  kernels::Packets alone = packets;
  alone.payload = target.data();
  alone.ranks = 1;
  alone.received = alone.sent;
  runner_.run(PacketStage::kDequantize, alone);
  return target.get();
}

Values TestPackets::q_local() const {
  Values all(static_cast<size_t>(numel()));
  for (size_t i = 0; i < q_locals_.size(); ++i) {
    const Values values = q_locals_[i]->get();
    std::copy(values.begin(), values.end(), all.begin() + q_offsets_[i]);
  }
  return all;
}

void TestPackets::set_q_local(const Values& values) {
  for (size_t i = 0; i < q_locals_.size(); ++i) {
    const auto count = static_cast<int64_t>(q_locals_[i]->get().size());
    q_locals_[i]->set(TestBucket::slice(values, q_offsets_[i], count));
  }
}

Values TestPackets::raw_of(const Values& values) const {
  return TestBucket::slice(values, packets.raw_offset, raw_numel_);
}

std::vector<PacketGroup> TestPackets::groups() const {
  std::vector<PacketGroup> groups;
  int64_t offset = 0;
  for (const Part& part : spec.parts) {
    if (part.is_raw()) continue;
    const int64_t size = spec.is_q ? part.cols : part.rows;
    for (int64_t begin = 0; begin < size; begin += kGroup) {
      for (int64_t k = 0; k < part.rank; ++k) {
        PacketGroup& group = groups.emplace_back();
        const int64_t first = offset + (spec.is_q ? k * size : k);
        for (int64_t i = begin; i < std::min(size, begin + kGroup); ++i) {
          group.elements.push_back(static_cast<size_t>(first + i * (spec.is_q ? 1 : part.rank)));
        }
      }
    }
    offset += size * part.rank;
  }
  // Owners have as many groups as each other; the last ones may have fewer.
  const auto chunks = static_cast<size_t>(exchange.chunks());
  const size_t share = (groups.size() + chunks - 1) / chunks;
  for (size_t i = 0; i < groups.size(); ++i) groups[i].owner = static_cast<int64_t>(i / share);
  return groups;
}

AllPackets all_packets(StageRunner& runner, const PacketSpec& spec, const Exchange& exchange) {
  AllPackets all;
  for (int32_t rank = 0; rank < exchange.ranks; ++rank) {
    all.push_back(std::make_unique<TestPackets>(runner, spec, exchange, rank));
  }
  return all;
}

void gather(const AllPackets& all) {
  std::vector<uint8_t> packets;
  for (const auto& rank : all) {
    const auto sent = rank->read(rank->packets.sent, rank->packets.layout.bytes());
    packets.insert(packets.end(), sent.begin(), sent.end());
  }
  for (const auto& rank : all) rank->write(rank->packets.received, packets);
}

void scatter(const AllPackets& all) {
  const int64_t bytes = all[0]->packets.layout.chunk_bytes;
  for (const auto& owner : all) {
    std::vector<uint8_t> chunks;
    for (const auto& rank : all) {
      const auto chunk = rank->read(rank->packets.sent + owner->packets.own_chunk * bytes, bytes);
      chunks.insert(chunks.end(), chunk.begin(), chunk.end());
    }
    owner->write(owner->packets.received, chunks);
  }
}

void collect(const AllPackets& all) {
  std::vector<uint8_t> sums;
  for (const auto& owner : all) {
    const auto chunk = owner->read(owner->packets.reduced, owner->packets.layout.chunk_bytes);
    sums.insert(sums.end(), chunk.begin(), chunk.end());
  }
  for (const auto& rank : all) rank->write(rank->packets.sent, sums);
}

void sum(const AllPackets& all) {
  if (all[0]->packets.layout.chunks == 1) {
    gather(all);
  } else {
    scatter(all);
    for (const auto& owner : all) owner->run(PacketStage::kRequantize);
    collect(all);
  }
  for (const auto& rank : all) rank->run(PacketStage::kDequantize);
}

}  // namespace powersgd::test
