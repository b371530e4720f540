// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "kernels/cuda/packet_codes.cuh"
#include "kernels/cuda/reduce.cuh"
#include "kernels/shared/layout.h"

// The work of a warp on packets: a batch of groups at a time, whose loads are in flight together,
// or a raw element or a flag for each lane.

namespace powersgd::kernels::cuda {

constexpr int kBatch = 4;  // consecutive groups that a warp takes at a time

// One group of a batch. A batch lies in shared memory, because its lanes share what finding it
// takes: a search and several divisions.
struct Group {
  float* values;  // of the payload
  int64_t stride;
  float* q_local;  // null for P
  int count;       // of elements, 0 if the group does not exist
  GroupPlace place;
};

// Returns the number in the group of a lane's j-th element.
__device__ __forceinline__ int element_of_lane(int j) { return lane_id() + j * kWarpSize; }

// A lane's elements of a batch.
template <typename T>
using BatchOf = T[kBatch][kElementsOfLane];

// Calls visit(g, j) for each of them.
template <typename Visit>
__device__ __forceinline__ void for_lane_elements(const Visit& visit) {
  POWERSGD_UNROLL
  for (int g = 0; g < kBatch; ++g) {
    POWERSGD_UNROLL
    for (int j = 0; j < kElementsOfLane; ++j) visit(g, j);
  }
}

// A range of the groups, raw elements or flags of a packet.
struct PacketRange {
  int64_t begin, end;

  POWERSGD_HOST_DEVICE int64_t count() const { return end - begin; }
};

// A launch works on a whole packet, or on a chunk of one. The buffers of packets that it accesses
// begin with the first group, raw element and flag of this part.
struct PacketPart {
  PacketRange groups, raw, flags;

  // Batches of groups, and then warps of raw elements and flags.
  POWERSGD_HOST_DEVICE int64_t batches() const { return ceil_div(groups.count(), kBatch); }
  POWERSGD_HOST_DEVICE int64_t units() const {
    return batches() + ceil_div(raw.count() + flags.count(), kWarpSize);
  }
};

__device__ __forceinline__ Group find_group(const Packets& packets, int64_t group,
                                            const GroupPlace& place) {
  const PacketFactor& factor = packets.factors[factor_of(packets, group)];
  const GroupElements elements = elements_of(factor, group - factor.group_begin);
  float* const q_local = static_cast<float*>(elements.q_local);
  return {static_cast<float*>(packets.payload) + elements.payload_offset, elements.stride,
          q_local == nullptr ? nullptr : q_local + elements.q_offset,
          static_cast<int>(elements.count), place};
}

// Finds the batch that begins with group `first`. All lanes of a warp call it. A group beyond the
// last one of the range has the place of that one.
__device__ __forceinline__ void find_batch(const Packets& packets, const PacketRange& range,
                                           int64_t first, Group* batch) {
  __syncwarp();
  const int lane = lane_id();
  if (lane < kBatch) {
    const bool exists = first + lane < range.end;
    const int64_t group = exists ? first + lane : range.end - 1;
    Group found = find_group(packets, group, place_of(packets.layout, group - range.begin));
    if (!exists) found.count = 0;
    batch[lane] = found;
  }
  __syncwarp();
}

// The packets, or their chunks, that are added. They follow each other in memory.
struct Sources {
  const uint8_t* first;
  int64_t bytes;  // of each
  int32_t count;
};

template <WireDType kWire>
__device__ __forceinline__ float load_scale(const uint8_t* packet, const GroupPlace& place) {
  if constexpr (!has_scales(kWire)) return 1;
  return bfloat16_to_float(*reinterpret_cast<const uint16_t*>(packet + place.scale));
}

// A lane's codes of a batch in one packet.
template <WireDType kWire>
struct SentBatch {
  BatchOf<typename Codes<kWire>::Code> codes;
  float scales[kBatch];

  __device__ __forceinline__ void load(const uint8_t* packet, const Group* batch) {
    POWERSGD_UNROLL
    for (int g = 0; g < kBatch; ++g) {
      Codes<kWire>::load(packet + batch[g].place.codes, lane_id(), codes[g]);
      scales[g] = load_scale<kWire>(packet, batch[g].place);
    }
  }
};

constexpr int kSourcesAtOnce = 4;  // whose loads are in flight together

// Adds what the sources have sent, in their order. A sum begins with -0, which changes no value.
template <WireDType kWire>
__device__ __forceinline__ void add_sources(const Sources& sources, const Group* batch,
                                            BatchOf<float>& sums) {
  for_lane_elements([&](int g, int j) { sums[g][j] = -0.0f; });
  POWERSGD_NO_UNROLL
  for (int32_t first = 0; first < sources.count; first += kSourcesAtOnce) {
    SentBatch<kWire> sent[kSourcesAtOnce];
    POWERSGD_UNROLL
    for (int i = 0; i < kSourcesAtOnce; ++i) {
      const int32_t source = first + i < sources.count ? first + i : sources.count - 1;
      sent[i].load(global(sources.first + source * sources.bytes), batch);
    }
    POWERSGD_UNROLL
    for (int i = 0; i < kSourcesAtOnce; ++i) {
      if (first + i >= sources.count) continue;
      for_lane_elements([&](int g, int j) {
        sums[g][j] += Codes<kWire>::decode(sent[i].codes[g][j], sent[i].scales[g]);
      });
    }
  }
}

// Raw elements in packets: float or bfloat16.
__device__ __forceinline__ float read_raw(const uint8_t* address, DType dtype) {
  if (dtype == DType::kBFloat16)
    return bfloat16_to_float(*reinterpret_cast<const uint16_t*>(global(address)));
  return *reinterpret_cast<const float*>(global(address));
}

__device__ __forceinline__ void write_raw(uint8_t* address, float value, DType dtype) {
  if (dtype == DType::kBFloat16)
    *reinterpret_cast<uint16_t*>(global(address)) = float_to_bfloat16(value);
  else
    *reinterpret_cast<float*>(global(address)) = value;
}

// Returns the sum of the raw elements that the sources have sent at `place`.
__device__ __forceinline__ float sum_raw(const Sources& sources, int64_t place, DType dtype) {
  float sum = -0.0f;
  POWERSGD_UNROLL_4
  for (int32_t i = 0; i < sources.count; ++i)
    sum += read_raw(sources.first + i * sources.bytes + place, dtype);
  return sum;
}

// Returns the largest magnitude of group l % kBatch to lane l, as the bits of a float. They are
// ordered as magnitudes are, and those that are not finite come last. At first a lane hands half of
// its groups to its partner, and keeps the other half.
__device__ __forceinline__ uint32_t largest_of_group(const BatchOf<float>& values) {
  uint32_t largest[kBatch] = {};
  for_lane_elements([&](int g, int j) {
    const uint32_t bits = float_bits(values[g][j]) & 0x7FFFFFFFu;
    largest[g] = bits > largest[g] ? bits : largest[g];
  });
  const auto raise = [](uint32_t value, uint32_t given, int distance) {
    const uint32_t other = __shfl_xor_sync(kAllLanes, given, distance);
    return other > value ? other : value;
  };
  POWERSGD_UNROLL
  for (int half = kBatch / 2; half > 0; half /= 2) {
    const bool upper = (lane_id() & half) != 0;
    POWERSGD_UNROLL
    for (int g = 0; g < half; ++g)
      largest[g] = raise(upper ? largest[g + half] : largest[g],
                         upper ? largest[g] : largest[g + half], half);
  }
  POWERSGD_UNROLL
  for (int distance = kBatch; distance < kWarpSize; distance *= 2)
    largest[0] = raise(largest[0], largest[0], distance);
  return largest[0];
}

// Returns the scale of each group to all lanes, and writes it to the packet. A lane divides once.
template <WireDType kWire>
__device__ __forceinline__ void make_scales(const BatchOf<float>& values, const Group* batch,
                                            uint8_t* packet, float (&scales)[kBatch],
                                            float (&inverses)[kBatch]) {
  const float scale = scale_of(kWire, __uint_as_float(largest_of_group(values)));
  const float inverse = inverse_of(scale);
  if (lane_id() < kBatch && batch[lane_id()].count > 0)
    *reinterpret_cast<uint16_t*>(packet + batch[lane_id()].place.scale) =
        static_cast<uint16_t>(float_bits(scale) >> 16);
  POWERSGD_UNROLL
  for (int g = 0; g < kBatch; ++g) {
    scales[g] = __shfl_sync(kAllLanes, scale, g);
    inverses[g] = __shfl_sync(kAllLanes, inverse, g);
  }
}

// Writes a batch to a packet, and tells what was sent. Elements that do not exist are 0.
template <WireDType kWire>
__device__ __forceinline__ void send(const BatchOf<float>& values, const Group* batch,
                                     uint8_t* packet, BatchOf<float>& sent) {
  using Wire = Codes<kWire>;
  float scales[kBatch] = {}, inverses[kBatch] = {};
  if constexpr (has_scales(kWire)) make_scales<kWire>(values, batch, packet, scales, inverses);
  POWERSGD_UNROLL
  for (int g = 0; g < kBatch; ++g) {
    typename Wire::Code codes[kElementsOfLane];
    POWERSGD_UNROLL
    for (int j = 0; j < kElementsOfLane; ++j) {
      codes[j] = Wire::encode(values[g][j], inverses[g]);
      sent[g][j] = Wire::decode(codes[j], scales[g]);
    }
    if (batch[g].count > 0) Wire::store(packet + batch[g].place.codes, lane_id(), codes);
  }
}

}  // namespace powersgd::kernels::cuda
