// SPDX-License-Identifier: BSD-3-Clause
//
// quantize, requantize and dequantize: payloads in the wire dtype (powersgd/packets.h).
//
// A warp takes a batch of groups at a time, a lane two elements of each. Warps go on by the number
// of all warps, until the factors are done, and then the raw elements and the flags, one for each
// lane.
//   1. The first lanes find the groups of the batch, one each: where they lie in the payload, in
//      the packet, and in q_local.
//   2. The lanes load their elements from the payload, or as sums over the sources.
//   3. They agree on the groups' scales by shuffles, round to codes and store them.
//   4. They keep the value that was sent, or what the sum's rounding adds to it.
// dequantize has only 1. and 2., and stores the sums.
#include "kernels/cuda/packet_groups.cuh"

namespace powersgd::kernels::cuda {
namespace {

constexpr int64_t kMaxBlocks = 1024;  // as many as run at once on a large device

__device__ __forceinline__ void store_if_finite(float* address, float value) {
  if (is_finite(value)) *address = value;
}

// Calls visit(g, j, pointer to the element in q_local) for the elements that have one.
template <typename Visit>
__device__ __forceinline__ void for_q_local(const Group* batch, const Visit& visit) {
  for_lane_elements([&](int g, int j) {
    if (batch[g].q_local != nullptr && element_of_lane(j) < batch[g].count)
      visit(g, j, global(batch[g].q_local) + element_of_lane(j));
  });
}

// Adds to q_local what rounding has changed.
__device__ __forceinline__ void keep_rounding(const Group* batch, const BatchOf<float>& exact,
                                              const BatchOf<float>& sent) {
  BatchOf<float> old;
  for_q_local(batch, [&](int g, int j, const float* q) { old[g][j] = *q; });
  for_q_local(batch, [&](int g, int j, float* q) {
    store_if_finite(q, old[g][j] + (sent[g][j] - exact[g][j]));
  });
}

// payload -> sent.
struct Quantize {
  static __device__ __forceinline__ void take(const Packets& packets, const Group* batch) {
    BatchOf<float> exact, sent;
    for_lane_elements([&](int g, int j) {
      const int element = element_of_lane(j);
      exact[g][j] =
          element < batch[g].count ? global(batch[g].values)[element * batch[g].stride] : 0.0f;
    });
    with_wire(packets.layout.factors.dtype,
              [&](auto wire) { send<decltype(wire)::value>(exact, batch, packets.sent, sent); });
    if (packets.of_host) return keep_rounding(batch, exact, sent);
    for_q_local(batch, [&](int g, int j, float* q) { store_if_finite(q, sent[g][j]); });
  }

  static __device__ __forceinline__ void take_raw(const Packets& packets, int64_t place,
                                                  float* element) {
    write_raw(packets.sent + place, *element, packets.raw_dtype);
  }

  static __device__ __forceinline__ void take_flag(const Packets& packets, int64_t place,
                                                   float* flag) {
    packets.sent[place] = *flag == 0 ? 0 : 1;
  }
};

// received -> reduced.
struct Requantize {
  static __device__ __forceinline__ Sources sources(const Packets& packets) {
    return {packets.received, packets.layout.chunk_bytes, packets.ranks};
  }

  static __device__ __forceinline__ void take(const Packets& packets, const Group* batch) {
    BatchOf<float> exact, sent;
    with_wire(packets.layout.factors.dtype, [&](auto wire) {
      add_sources<decltype(wire)::value>(sources(packets), batch, exact);
      send<decltype(wire)::value>(exact, batch, packets.reduced, sent);
    });
    keep_rounding(batch, exact, sent);
  }

  static __device__ __forceinline__ void take_raw(const Packets& packets, int64_t place, float*) {
    write_raw(packets.reduced + place, sum_raw(sources(packets), place, packets.raw_dtype),
              packets.raw_dtype);
  }

  static __device__ __forceinline__ void take_flag(const Packets& packets, int64_t place, float*) {
    uint8_t any = 0;
    for (int32_t i = 0; i < packets.ranks; ++i)
      any |= packets.received[i * packets.layout.chunk_bytes + place];
    packets.reduced[place] = any;
  }
};

// The packets of all ranks -> payload, or the packet of the sum.
struct Dequantize {
  static __device__ __forceinline__ Sources sources(const Packets& packets) {
    if (packets.layout.chunks > 1) return {packets.sent, 0, 1};
    return {packets.received, packets.layout.chunk_bytes, packets.ranks};
  }

  static __device__ __forceinline__ void take(const Packets& packets, const Group* batch) {
    BatchOf<float> sums;
    with_wire(packets.layout.factors.dtype, [&](auto wire) {
      add_sources<decltype(wire)::value>(sources(packets), batch, sums);
    });
    for_lane_elements([&](int g, int j) {
      const int element = element_of_lane(j);
      if (element < batch[g].count) global(batch[g].values)[element * batch[g].stride] = sums[g][j];
    });
  }

  static __device__ __forceinline__ void take_raw(const Packets& packets, int64_t place,
                                                  float* element) {
    *element = sum_raw(sources(packets), place, packets.raw_dtype);
  }

  static __device__ __forceinline__ void take_flag(const Packets& packets, int64_t place,
                                                   float* flag) {
    const Sources all = sources(packets);
    int count = 0;
    for (int32_t i = 0; i < all.count; ++i) count += all.first[i * all.bytes + place];
    *flag = static_cast<float>(count);
  }
};

template <typename Operation>
__global__ void __launch_bounds__(kThreads)
    packet_kernel(Packets packets, PacketPart part, int64_t warps) {
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  Group* const batch = reinterpret_cast<Group*>(shared_memory()) + warp * kBatch;
  float* const raw = static_cast<float*>(packets.payload) + packets.raw_offset;
  float* const flags = raw + packets.layout.raw.count;
  const int64_t batches = part.batches(), units = part.units();
  for (int64_t unit = int64_t{blockIdx.x} * kWarps + warp; unit < units; unit += warps) {
    if (unit < batches) {
      find_batch(packets, part.groups, part.groups.begin + unit * kBatch, batch);
      Operation::take(packets, batch);
      continue;
    }
    const int64_t word = (unit - batches) * kWarpSize + lane_id();
    const int64_t flag = word - part.raw.count();
    if (flag < 0) {
      Operation::take_raw(packets, place_of(packets.layout, packets.layout.raw, word),
                          global(raw) + part.raw.begin + word);
    } else if (flag < part.flags.count()) {
      Operation::take_flag(packets, place_of(packets.layout, packets.layout.flags, flag),
                           flags + part.flags.begin + flag);
    }
  }
}

template <typename Operation>
Status launch_packets(const Packets& packets, const PacketPart& part, Stream stream) {
  const int64_t blocks = std::min(ceil_div(part.units(), kWarps), kMaxBlocks);
  return launch<packet_kernel<Operation>>(blocks, kWarps * kBatch * sizeof(Group), stream,
                                          Predecessor::kAnything, packets, part, blocks * kWarps);
}

PacketPart whole_packet(const PacketLayout& layout) {
  return {{0, layout.factors.groups}, {0, layout.raw.count}, {0, layout.flags.count}};
}

// The part of [0, count) that belongs to a chunk.
PacketRange in_chunk(int32_t chunk, int64_t count, int64_t per_chunk) {
  return {std::min(count, chunk * per_chunk), std::min(count, (chunk + 1) * per_chunk)};
}

PacketPart chunk_of_packet(const PacketLayout& layout, int32_t chunk) {
  return {in_chunk(chunk, layout.factors.groups, layout.factors.groups_per_chunk),
          in_chunk(chunk, layout.raw.count, layout.raw.per_chunk),
          in_chunk(chunk, layout.flags.count, layout.flags.per_chunk)};
}

}  // namespace

Status quantize(const Packets& packets, Stream stream) {
  return launch_packets<Quantize>(packets, whole_packet(packets.layout), stream);
}

Status requantize(const Packets& packets, Stream stream) {
  return launch_packets<Requantize>(packets, chunk_of_packet(packets.layout, packets.own_chunk),
                                    stream);
}

Status dequantize(const Packets& packets, Stream stream) {
  return launch_packets<Dequantize>(packets, whole_packet(packets.layout), stream);
}

}  // namespace powersgd::kernels::cuda
