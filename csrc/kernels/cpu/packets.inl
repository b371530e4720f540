// SPDX-License-Identifier: BSD-3-Clause
//
// Packets: each thread takes its own groups from a payload, or from what the ranks have sent, to a
// buffer in the L1 cache. There it computes, and then puts the results where they belong.
#include <algorithm>

#include "kernels/cpu/packet_groups.h"
#include "kernels/cpu/simd/convert.h"
#include "kernels/shared/packets.h"

namespace powersgd::kernels::cpu::POWERSGD_TARGET {

// The least groups that a thread takes: as many elements as kWireChunk.
constexpr int64_t kGroupsAtATime = 256;

struct Range {
  int64_t begin, end;
};

// Returns the part of [0, size) that belongs to a chunk of `per_chunk`.
inline Range part_of_chunk(int64_t size, int64_t per_chunk, int64_t chunk) {
  return {std::min(size, chunk * per_chunk), std::min(size, (chunk + 1) * per_chunk)};
}

// The three functions, with factors of F.
template <class F>
struct PacketWork {
  const Packets& packets;
  const PacketLayout& layout = packets.layout;

  F* payload() const { return static_cast<F*>(packets.payload); }
  F* flags() const { return payload() + packets.raw_offset + packets.raw_numel; }

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
      F* q_local = static_cast<F*>(elements.q_local);
      body(Group<F>{elements.count, payload() + elements.payload_offset, elements.stride,
                    q_local == nullptr ? nullptr : q_local + elements.q_offset},
           place_of(layout, layout.factors, i));
    }
  }

  template <class Body>
  void for_raw_groups(const Range& range, const Body& body) const {
    for (int64_t i = range.begin; i < range.end; ++i) {
      const int64_t first = i * kGroup;
      body(Group<F>{std::min(kGroup, packets.raw_numel - first),
                    payload() + packets.raw_offset + first, 1,
                    static_cast<F*>(packets.rounding) + first},
           place_of(layout, layout.raw, i));
    }
  }

  // Shares both ranges of groups out over threads.
  template <class OnFactor, class OnRaw>
  void for_each_group(const Range& factors, const Range& raw, const ParallelFor& parallel_for,
                      const OnFactor& on_factor, const OnRaw& on_raw) const {
    const int64_t border = factors.end - factors.begin;
    const int64_t groups = border + raw.end - raw.begin;
    if (groups == 0) return;
    parallel_for(ceil_div(groups, kGroupsAtATime), [&](int64_t from, int64_t to) {
      const int64_t begin = from * kGroupsAtATime;
      const int64_t end = std::min(groups, to * kGroupsAtATime);
      const int64_t of_factors = factors.begin, of_raw = raw.begin - border;
      for_factor_groups({std::min(begin, border) + of_factors, std::min(end, border) + of_factors},
                        on_factor);
      for_raw_groups({std::max(begin, border) + of_raw, std::max(end, border) + of_raw}, on_raw);
    });
  }

  POWERSGD_TILE_FUNCTION void send_factor(const Group<F>& group, const GroupPlace& place) const {
    GroupBuffer<F> exact, sent;
    load_group(group, exact.values);
    write_group(layout.factors.dtype, place, exact.values, packets.sent, sent.values);
    if (group.kept == nullptr) return;
    change_kept(group, [&](Vector<F>, int64_t j) { return load(sent.values + j); });
  }

  POWERSGD_TILE_FUNCTION void send_raw(const Group<F>& group, const GroupPlace& place) const {
    GroupBuffer<F> exact, sent;
    load_group(group, exact.values);
    if (packets.drop_residual) std::fill_n(group.kept, group.count, F{0});
    for_each_vector<F>(group.count, [&](int64_t j, int64_t count) {
      store(exact.values + j, load(exact.values + j) + load_first(group.kept + j, count));
    });
    write_group(layout.raw.dtype, place, exact.values, packets.sent, sent.values);
    change_kept(group, [&](Vector<F>, int64_t j) {
      return load(exact.values + j) - load(sent.values + j);
    });
  }

  void quantize(const ParallelFor& parallel_for) const {
    for_each_group(
        {0, layout.factors.groups}, {0, layout.raw.groups}, parallel_for,
        [&](const auto& group, const GroupPlace& place) { send_factor(group, place); },
        [&](const auto& group, const GroupPlace& place) { send_raw(group, place); });
    for (int64_t i = 0; i < layout.flags; ++i) {
      packets.sent[place_of_flag(layout, i)] = flags()[i] != 0 ? 1 : 0;
    }
  }

  // Writes the sum of a group to the owner's chunk. What it keeps changes by kSign times the
  // difference that rounding makes.
  template <int kSign>
  POWERSGD_TILE_FUNCTION void reduce(WireDType dtype, const Group<F>& group, GroupPlace place,
                                     const Sources& sources) const {
    const int64_t chunk = packets.own_chunk * layout.chunk_bytes;
    place = {place.codes - chunk, place.scale - chunk};
    GroupBuffer<F> exact, sent;
    sum_group(dtype, place, sources, exact.values);
    write_group(dtype, place, exact.values, packets.reduced, sent.values);
    if (group.kept == nullptr) return;
    change_kept(group, [&](Vector<F> kept, int64_t j) {
      const Vector<F> more = load(sent.values + j) - load(exact.values + j);
      return kSign > 0 ? kept + more : kept - more;
    });
  }

  void requantize(const ParallelFor& parallel_for) const {
    const Sources sources{packets.received, layout.chunk_bytes, packets.ranks};
    const int64_t own = packets.own_chunk;
    for_each_group(
        part_of_chunk(layout.factors.groups, layout.factors.groups_per_chunk, own),
        part_of_chunk(layout.raw.groups, layout.raw.groups_per_chunk, own), parallel_for,
        [&](const auto& group, const GroupPlace& place) {
          reduce<1>(layout.factors.dtype, group, place, sources);
        },
        [&](const auto& group, const GroupPlace& place) {
          reduce<-1>(layout.raw.dtype, group, place, sources);
        });
    const Range flags = part_of_chunk(layout.flags, layout.flags_per_chunk, own);
    for (int64_t i = flags.begin; i < flags.end; ++i) {
      const int64_t place = place_of_flag(layout, i) - own * layout.chunk_bytes;
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

  POWERSGD_TILE_FUNCTION void receive(WireDType dtype, const Group<F>& group,
                                      const GroupPlace& place, const Sources& sources) const {
    GroupBuffer<F> sum;
    sum_group(dtype, place, sources, sum.values);
    store_group(group, sum.values);
  }

  void dequantize(const ParallelFor& parallel_for) const {
    const Sources sources = layout.chunks == 1
                                ? Sources{packets.received, layout.bytes(), packets.ranks}
                                : Sources{packets.sent, 0, 1};
    for_each_group(
        {0, layout.factors.groups}, {0, layout.raw.groups}, parallel_for,
        [&](const auto& group, const GroupPlace& place) {
          receive(layout.factors.dtype, group, place, sources);
        },
        [&](const auto& group, const GroupPlace& place) {
          receive(layout.raw.dtype, group, place, sources);
        });
    for (int64_t i = 0; i < layout.flags; ++i) {
      flags()[i] = static_cast<F>(flags_set(sources, place_of_flag(layout, i)));
    }
  }
};

// Calls function(work) with the work of the packets' factor dtype.
template <class Function>
inline void with_work(const Packets& packets, const Function& function) {
  if (packets.factor_dtype == DType::kFloat64) {
    function(PacketWork<double>{packets});
  } else {
    function(PacketWork<float>{packets});
  }
}

inline void quantize(const Packets& packets, const ParallelFor& parallel_for) {
  with_work(packets, [&](const auto& work) { work.quantize(parallel_for); });
}

inline void requantize(const Packets& packets, const ParallelFor& parallel_for) {
  with_work(packets, [&](const auto& work) { work.requantize(parallel_for); });
}

inline void dequantize(const Packets& packets, const ParallelFor& parallel_for) {
  with_work(packets, [&](const auto& work) { work.dequantize(parallel_for); });
}

}  // namespace powersgd::kernels::cpu::POWERSGD_TARGET
