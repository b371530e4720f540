// SPDX-License-Identifier: BSD-3-Clause
//
// Packets: each thread loads its groups, from a payload or from what the ranks have sent, into a
// buffer in the L1 cache, computes there, and stores the results. It copies or adds raw elements
// without a buffer.
#include <algorithm>

#include "kernels/cpu/packet_groups.h"
#include "kernels/cpu/simd/convert.h"
#include "kernels/shared/packet_layout.h"

namespace powersgd::kernels::cpu::POWERSGD_TARGET {

// The least that a thread takes: as many elements as kWireChunk.
constexpr int64_t kGroupsAtATime = 256;
constexpr int64_t kRawAtATime = kGroupsAtATime * kGroup;

struct Range {
  int64_t begin, end;

  int64_t count() const { return end - begin; }
  Range part(int64_t from, int64_t to) const {
    return {std::min(end, begin + from), std::min(end, begin + to)};
  }
};

// Returns the part of [0, size) that belongs to a chunk of `per_chunk`.
inline Range part_of_chunk(int64_t size, int64_t per_chunk, int64_t chunk) {
  return {std::min(size, chunk * per_chunk), std::min(size, (chunk + 1) * per_chunk)};
}

// The three functions.
struct PacketWork {
  const Packets& packets;
  const PacketLayout& layout = packets.layout;

  float* payload() const { return static_cast<float*>(packets.payload); }
  float* raw() const { return payload() + packets.raw_offset; }
  float* flags() const { return raw() + layout.raw.count; }

  // Calls function(Raw{}) with the type that stores raw elements in packets.
  template <class Function>
  void with_raw(const Function& function) const {
    if (packets.raw_dtype == DType::kBFloat16) return function(BFloat16{});
    function(float{});
  }

  // Calls body(group, place) for each group of the factors in the range.
  template <class Body>
  void for_factor_groups(const Range& range, const Body& body) const {
    if (range.begin == range.end) return;
    int32_t index = factor_of(packets, range.begin);
    for (int64_t i = range.begin; i < range.end; ++i) {
      while (index + 1 < packets.num_factors && packets.factors[index + 1].group_begin <= i) {
        ++index;
      }
      const PacketFactor& factor = packets.factors[index];
      const GroupElements elements = elements_of(factor, i - factor.group_begin);
      float* q_local = static_cast<float*>(elements.q_local);
      body(Group{elements.count, payload() + elements.payload_offset, elements.stride,
                 q_local == nullptr ? nullptr : q_local + elements.q_offset},
           place_of(layout, i));
    }
  }

  // Calls body(elements, count, place) for the runs of raw elements in the range, each in a chunk.
  template <class Body>
  void for_raw_runs(const Range& range, const Body& body) const {
    for (int64_t first = range.begin; first < range.end;) {
      const int64_t in_chunk = layout.raw.per_chunk - first % layout.raw.per_chunk;
      const int64_t count = std::min(in_chunk, range.end - first);
      body(raw() + first, count, place_of(layout, layout.raw, first));
      first += count;
    }
  }

  // Shares both ranges out over threads.
  template <class OnGroup, class OnRun>
  void for_each(const Range& groups, const Range& raw, const ParallelFor& parallel_for,
                const OnGroup& on_group, const OnRun& on_run) const {
    const int64_t border = ceil_div(groups.count(), kGroupsAtATime);
    const int64_t parts = border + ceil_div(raw.count(), kRawAtATime);
    if (parts == 0) return;
    parallel_for(parts, [&](int64_t from, int64_t to) {
      for_factor_groups(groups.part(std::min(from, border) * kGroupsAtATime,
                                    std::min(to, border) * kGroupsAtATime),
                        on_group);
      for_raw_runs(raw.part(std::max<int64_t>(0, from - border) * kRawAtATime,
                            std::max<int64_t>(0, to - border) * kRawAtATime),
                   on_run);
    });
  }

  POWERSGD_TILE_FUNCTION void send(const Group& group, const GroupPlace& place) const {
    GroupBuffer exact, sent;
    load_group(group, exact.values);
    write_group(layout.factors.dtype, place, exact.values, packets.sent, sent.values);
    if (packets.of_host) return keep_rounding(group, exact, sent);
    if (group.q_local == nullptr) return;
    change_q_local(group, [&](Floats, int64_t j) { return load(sent.values + j); });
  }

  static void keep_rounding(const Group& group, const GroupBuffer& exact, const GroupBuffer& sent) {
    if (group.q_local == nullptr) return;
    change_q_local(group, [&](Floats q, int64_t j) {
      return q + (load(sent.values + j) - load(exact.values + j));
    });
  }

  void quantize(const ParallelFor& parallel_for) const {
    for_each(
        {0, layout.factors.groups}, {0, layout.raw.count}, parallel_for,
        [&](const Group& group, const GroupPlace& place) { send(group, place); },
        [&](const float* elements, int64_t count, int64_t place) {
          with_raw([&](auto raw) {
            auto* sent = reinterpret_cast<decltype(raw)*>(packets.sent + place);
            for_each_vector(count, [&](int64_t j, int64_t n) {
              store_first(sent + j, n, load_first(elements + j, n));
            });
          });
        });
    for (int64_t i = 0; i < layout.flags.count; ++i) {
      packets.sent[place_of(layout, layout.flags, i)] = flags()[i] != 0 ? 1 : 0;
    }
  }

  // Writes the sum of a group to the owner's chunk, and adds the rounding to q_local.
  POWERSGD_TILE_FUNCTION void reduce(const Group& group, const GroupPlace& place,
                                     const Sources& sources) const {
    GroupBuffer exact, sent;
    sum_group(layout.factors.dtype, place, sources, exact.values);
    write_group(layout.factors.dtype, place, exact.values, packets.reduced, sent.values);
    keep_rounding(group, exact, sent);
  }

  void requantize(const ParallelFor& parallel_for) const {
    const Sources sources{packets.received, layout.chunk_bytes, packets.ranks};
    const int64_t own = packets.own_chunk, chunk = own * layout.chunk_bytes;
    for_each(
        part_of_chunk(layout.factors.groups, layout.factors.groups_per_chunk, own),
        part_of_chunk(layout.raw.count, layout.raw.per_chunk, own), parallel_for,
        [&](const Group& group, const GroupPlace& place) {
          reduce(group, {place.codes - chunk, place.scale - chunk}, sources);
        },
        [&](const float*, int64_t count, int64_t place) {
          with_raw([&](auto raw) {
            using Raw = decltype(raw);
            auto* reduced = reinterpret_cast<Raw*>(packets.reduced + place - chunk);
            sum_raw<Raw>(sources, place - chunk, count, reduced);
          });
        });
    const Range flags = part_of_chunk(layout.flags.count, layout.flags.per_chunk, own);
    for (int64_t i = flags.begin; i < flags.end; ++i) {
      const int64_t place = place_of(layout, layout.flags, i) - chunk;
      packets.reduced[place] = flags_set(sources, place) > 0 ? 1 : 0;
    }
  }

  static int32_t flags_set(const Sources& sources, int64_t place) {
    int32_t count = 0;
    for (int32_t rank = 0; rank < sources.count; ++rank) {
      count += sources.first[rank * sources.bytes + place];
    }
    return count;
  }

  POWERSGD_TILE_FUNCTION void receive(const Group& group, const GroupPlace& place,
                                      const Sources& sources) const {
    GroupBuffer sum;
    sum_group(layout.factors.dtype, place, sources, sum.values);
    store_group(group, sum.values);
  }

  void dequantize(const ParallelFor& parallel_for) const {
    const Sources sources = layout.chunks == 1
                                ? Sources{packets.received, layout.bytes(), packets.ranks}
                                : Sources{packets.sent, 0, 1};
    for_each(
        {0, layout.factors.groups}, {0, layout.raw.count}, parallel_for,
        [&](const Group& group, const GroupPlace& place) { receive(group, place, sources); },
        [&](float* elements, int64_t count, int64_t place) {
          with_raw([&](auto raw) { sum_raw<decltype(raw)>(sources, place, count, elements); });
        });
    for (int64_t i = 0; i < layout.flags.count; ++i) {
      flags()[i] = static_cast<float>(flags_set(sources, place_of(layout, layout.flags, i)));
    }
  }
};

inline void quantize(const Packets& packets, const ParallelFor& parallel_for) {
  PacketWork{packets}.quantize(parallel_for);
}

inline void requantize(const Packets& packets, const ParallelFor& parallel_for) {
  PacketWork{packets}.requantize(parallel_for);
}

inline void dequantize(const Packets& packets, const ParallelFor& parallel_for) {
  PacketWork{packets}.dequantize(parallel_for);
}

}  // namespace powersgd::kernels::cpu::POWERSGD_TARGET
