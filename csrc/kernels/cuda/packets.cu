// SPDX-License-Identifier: BSD-3-Clause
//
// quantize, requantize and dequantize: payloads in the wire dtype (powersgd/packets.h).
//
// A warp takes a batch of groups at a time, a lane two elements of each. Warps go on by the number
// of all warps, until the factors, the raw segments and the flags are done.
//   1. The first lanes find the groups of the batch, one each: where they lie in the payload, in
//      the packet, and in q_local or rounding.
//   2. The lanes load their elements. These are those of the payload, or sums over the sources.
//   3. They agree on the groups' scales by shuffles, round to codes and store them.
//   4. They keep what was rounded off, or the value that was sent.
// dequantize has only 1. and 2., and stores the sums.
#include "kernels/cuda/packet_groups.cuh"

namespace powersgd::kernels::cuda {
namespace {

constexpr int64_t kMaxBlocks = 1024;  // as many as run at once on a large device

template <typename F>
__device__ __forceinline__ void store_if_finite(F* address, F value) {
  if (is_finite(value)) *address = value;
}

// Calls visit(g, j, pointer to the element in q_local or rounding) for the elements that have one.
template <typename F, typename Visit>
__device__ __forceinline__ void for_kept(const Group<F>* batch, const Visit& visit) {
  for_lane_elements([&](int g, int j) {
    if (batch[g].kept != nullptr && element_of_lane(j) < batch[g].count)
      visit(g, j, global(batch[g].kept) + element_of_lane(j));
  });
}

// payload -> sent.
struct Quantize {
  template <bool kRaw, typename F>
  static __device__ __forceinline__ void take(const Packets& packets, WireDType dtype,
                                              const Group<F>* batch) {
    BatchOf<F> exact, sent;
    for_lane_elements([&](int g, int j) {
      const int element = element_of_lane(j);
      exact[g][j] =
          element < batch[g].count ? global(batch[g].values)[element * batch[g].stride] : F{0};
    });
    if (kRaw)
      for_kept(batch, [&](int g, int j, const F* rounding) {
        exact[g][j] += packets.drop_residual ? F{0} : *rounding;
      });
    with_wire(dtype,
              [&](auto wire) { send<decltype(wire)::value>(exact, batch, packets.sent, sent); });
    for_kept(batch, [&](int g, int j, F* kept) {
      if (kRaw && packets.drop_residual) *kept = 0;
      store_if_finite(kept, kRaw ? exact[g][j] - sent[g][j] : sent[g][j]);
    });
  }

  template <typename F>
  static __device__ __forceinline__ void take_flag(const Packets& packets, int64_t place, F* flag) {
    packets.sent[place] = *flag == 0 ? 0 : 1;
  }
};

// received -> reduced.
struct Requantize {
  template <bool kRaw, typename F>
  static __device__ __forceinline__ void take(const Packets& packets, WireDType dtype,
                                              const Group<F>* batch) {
    BatchOf<F> old, exact, sent;
    const Sources sources{packets.received, packets.layout.chunk_bytes, packets.ranks};
    with_wire(dtype, [&](auto wire) {
      add_sources<decltype(wire)::value>(sources, batch, exact);
      send<decltype(wire)::value>(exact, batch, packets.reduced, sent);
    });
    for_kept(batch, [&](int g, int j, const F* kept) { old[g][j] = *kept; });
    for_kept(batch, [&](int g, int j, F* kept) {
      const F more = sent[g][j] - exact[g][j];
      store_if_finite(kept, kRaw ? old[g][j] - more : old[g][j] + more);
    });
  }

  template <typename F>
  static __device__ __forceinline__ void take_flag(const Packets& packets, int64_t place, F*) {
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

  template <bool kRaw, typename F>
  static __device__ __forceinline__ void take(const Packets& packets, WireDType dtype,
                                              const Group<F>* batch) {
    BatchOf<F> sums;
    with_wire(dtype, [&](auto wire) {
      add_sources<decltype(wire)::value>(sources(packets), batch, sums);
    });
    for_lane_elements([&](int g, int j) {
      const int element = element_of_lane(j);
      if (element < batch[g].count) global(batch[g].values)[element * batch[g].stride] = sums[g][j];
    });
  }

  template <typename F>
  static __device__ __forceinline__ void take_flag(const Packets& packets, int64_t place, F* flag) {
    const Sources all = sources(packets);
    int count = 0;
    for (int32_t i = 0; i < all.count; ++i) count += all.first[i * all.bytes + place];
    *flag = static_cast<F>(count);
  }
};

template <typename Operation, bool kRaw, typename F>
__device__ __forceinline__ void take_batch(const Packets& packets, const PacketRange& range,
                                           int64_t first, Group<F>* batch) {
  find_batch<kRaw>(packets, range, first, batch);
  const PacketLayout& layout = packets.layout;
  Operation::template take<kRaw>(packets, kRaw ? layout.raw.dtype : layout.factors.dtype, batch);
}

template <typename Operation, typename F>
__global__ void __launch_bounds__(kThreads)
    packet_kernel(Packets packets, PacketPart part, int64_t warps) {
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  Group<F>* const batch = reinterpret_cast<Group<F>*>(shared_memory()) + warp * kBatch;
  const int64_t factor_units = part.factor_units(), raw_units = part.raw_units();
  const int64_t units = part.units();
  for (int64_t unit = int64_t{blockIdx.x} * kWarps + warp; unit < units; unit += warps) {
    int64_t index = unit;
    if (index < factor_units) {
      take_batch<Operation, false>(packets, part.factors, part.factors.begin + index * kBatch,
                                   batch);
      continue;
    }
    index -= factor_units;
    if (index < raw_units) {
      take_batch<Operation, true>(packets, part.raw, part.raw.begin + index * kBatch, batch);
      continue;
    }
    index -= raw_units;
    const int64_t flag = index * kWarpSize + lane_id();
    if (flag >= part.flags.count()) continue;
    F* const flags = static_cast<F*>(packets.payload) + packets.raw_offset + packets.raw_numel;
    Operation::take_flag(packets, place_of_flag(packets.layout, flag),
                         flags + part.flags.begin + flag);
  }
}

template <typename Operation, typename F>
Status launch_packets(const Packets& packets, const PacketPart& part, Stream stream) {
  const int64_t blocks = std::min(ceil_div(part.units(), kWarps), kMaxBlocks);
  return launch<packet_kernel<Operation, F>>(blocks, kWarps * kBatch * sizeof(Group<F>), stream,
                                             Predecessor::kAnything, packets, part,
                                             blocks * kWarps);
}

template <typename Operation>
Status launch_packets(const Packets& packets, const PacketPart& part, Stream stream) {
  return packets.factor_dtype == DType::kFloat64
             ? launch_packets<Operation, double>(packets, part, stream)
             : launch_packets<Operation, float>(packets, part, stream);
}

PacketPart whole_packet(const PacketLayout& layout) {
  return {{0, layout.factors.groups}, {0, layout.raw.groups}, {0, layout.flags}};
}

// The part of [0, count) that belongs to a chunk.
PacketRange in_chunk(int32_t chunk, int64_t count, int64_t per_chunk) {
  return {std::min(count, chunk * per_chunk), std::min(count, (chunk + 1) * per_chunk)};
}

PacketPart chunk_of_packet(const PacketLayout& layout, int32_t chunk) {
  return {in_chunk(chunk, layout.factors.groups, layout.factors.groups_per_chunk),
          in_chunk(chunk, layout.raw.groups, layout.raw.groups_per_chunk),
          in_chunk(chunk, layout.flags, layout.flags_per_chunk)};
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
