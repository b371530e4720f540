// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kernels/cpu/codes.h"
#include "kernels/cpu/simd/convert.h"
#include "kernels/shared/packet_layout.h"

// One group at a time: from a payload to a buffer in the L1 cache, then to a packet, and back. Raw
// elements need no buffer.
namespace powersgd::kernels::cpu::POWERSGD_TARGET {

// One group of a factor, outside of packets.
struct Group {
  int64_t count;
  float* values;  // in the payload
  int64_t stride;
  float* q_local;  // [count]; null for P
};

struct alignas(64) GroupBuffer {
  float values[kGroup];
};

// Loads the elements of a group, followed by zeros.
POWERSGD_TILE_FUNCTION inline void load_group(const Group& group, float* values) {
  if (group.count < kGroup) std::fill_n(values, kGroup, 0.0f);
  if (group.stride == 1) {
    for_each_vector(group.count, [&](int64_t j, int64_t count) {
      store(values + j, load_first(group.values + j, count));
    });
  } else {
    for (int64_t i = 0; i < group.count; ++i) values[i] = group.values[i * group.stride];
  }
}

POWERSGD_TILE_FUNCTION inline void store_group(const Group& group, const float* values) {
  if (group.stride == 1) {
    for_each_vector(group.count, [&](int64_t j, int64_t count) {
      store_first(group.values + j, count, load(values + j));
    });
  } else {
    for (int64_t i = 0; i < group.count; ++i) group.values[i * group.stride] = values[i];
  }
}

// Calls change(q, j) for each vector of q_local, from element j of the group on. Its result takes
// the place of `q` where it is finite.
template <class Change>
inline void change_q_local(const Group& group, const Change& change) {
  const Floats zero = {};
  for_each_vector(group.count, [&](int64_t j, int64_t count) {
    const Floats q = load_first(group.q_local + j, count);
    const Floats changed = change(q, j);
    store_first(group.q_local + j, count, changed - changed == zero ? changed : q);
  });
}

// Writes a group to a packet, and sets `sent` to what its codes stand for.
inline void write_group(WireDType dtype, const GroupPlace& place, const float* exact,
                        uint8_t* packet, float* sent) {
  float scale = 1;
  if (has_scales(dtype)) {
    scale = scale_of(dtype, largest_of_group(exact));
    const auto upper = static_cast<uint16_t>(bits_of(scale) >> 16);
    std::memcpy(packet + place.scale, &upper, sizeof(upper));
  }
  encode(dtype, exact, scale, packet + place.codes);
  decode(dtype, packet + place.codes, scale, sent);
}

inline void read_group(WireDType dtype, const GroupPlace& place, const uint8_t* packet,
                       float* values) {
  float scale = 1;
  if (has_scales(dtype)) {
    uint16_t upper;
    std::memcpy(&upper, packet + place.scale, sizeof(upper));
    scale = float_of_bits(uint32_t{upper} << 16);
  }
  decode(dtype, packet + place.codes, scale, values);
}

// Packets, or the same chunk of packets, one for each rank.
struct Sources {
  const uint8_t* first;
  int64_t bytes;
  int32_t count;
};

POWERSGD_TILE_FUNCTION inline void sum_group(WireDType dtype, const GroupPlace& place,
                                             const Sources& sources, float* sum) {
  read_group(dtype, place, sources.first, sum);
  for (int32_t rank = 1; rank < sources.count; ++rank) {
    GroupBuffer next;
    read_group(dtype, place, sources.first + rank * sources.bytes, next.values);
    for (int64_t j = 0; j < kGroup; j += kLanes<float>) {
      store(sum + j, load(sum + j) + load(next.values + j));
    }
  }
}

// Adds `count` raw elements of the sources, from `place` on, which are stored as Raw.
template <class Raw, class Sum>
POWERSGD_TILE_FUNCTION inline void sum_raw(const Sources& sources, int64_t place, int64_t count,
                                           Sum* sum) {
  const auto source = [&](int32_t rank) {
    return reinterpret_cast<const Raw*>(sources.first + rank * sources.bytes + place);
  };
  for_each_vector(count, [&](int64_t j, int64_t n) {
    Floats total = load_first(source(0) + j, n);
    for (int32_t rank = 1; rank < sources.count; ++rank) {
      total = total + load_first(source(rank) + j, n);
    }
    store_first(sum + j, n, total);
  });
}

}  // namespace powersgd::kernels::cpu::POWERSGD_TARGET
