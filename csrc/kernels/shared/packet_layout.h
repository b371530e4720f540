// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cfloat>
#include <cstdint>
#include <cstring>

#include "kernels/shared/host_device.h"
#include "powersgd/kernels/packets.h"

// How both devices find their way in a packet.

namespace powersgd::kernels {

POWERSGD_HOST_DEVICE constexpr bool has_scales(WireDType dtype) {
  return dtype == WireDType::kInt8 || dtype == WireDType::kInt4;
}

// The bytes that the codes of a group take. The order of the codes in a group is the device's own.
POWERSGD_HOST_DEVICE constexpr int64_t code_bytes(WireDType dtype) {
  switch (dtype) {
    case WireDType::kBFloat16:
      return 2 * kGroup;
    case WireDType::kInt8:
      return kGroup;
    case WireDType::kInt4:
      return kGroup / 2;
  }
  return 0;
}

POWERSGD_HOST_DEVICE inline uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

POWERSGD_HOST_DEVICE inline float float_of_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

// Returns the scale of a group from its largest magnitude, NaN if that is not finite. The lower
// half of its bits is 0, so it travels as bfloat16.
POWERSGD_HOST_DEVICE inline float scale_of(WireDType dtype, float largest) {
  constexpr uint32_t kUpperHalf = 0xFFFF0000U, kSmallest = 0x00800000U;
  if (!(largest - largest == 0)) return float_of_bits(0x7FC00000U);
  const float most = dtype == WireDType::kInt8 ? 127 : 7;  // the largest code
  const uint32_t rounded_up = (bits_of(largest / most) + 0xFFFFU) & kUpperHalf;
  const uint32_t greatest = bits_of(FLT_MAX / most) & kUpperHalf;  // code * scale is finite
  if (rounded_up < kSmallest) return 0;
  return float_of_bits(rounded_up < greatest ? rounded_up : greatest);
}

// Returns what the elements of a group are multiplied by before they are rounded to codes.
POWERSGD_HOST_DEVICE inline float inverse_of(float scale) { return scale > 0 ? 1 / scale : 0; }

// Where the codes and the scale of a group are, from the start of its packet.
struct GroupPlace {
  int64_t codes, scale;
};

POWERSGD_HOST_DEVICE inline GroupPlace place_of(const PacketLayout& layout, int64_t group) {
  const PacketSection& section = layout.factors;
  const int64_t chunk = group / section.groups_per_chunk;
  const int64_t in_chunk = group % section.groups_per_chunk;
  const int64_t start = chunk * layout.chunk_bytes;
  return {start + section.codes_at + in_chunk * code_bytes(section.dtype),
          start + section.scales_at + in_chunk * 2};
}

// Where a raw element or a flag is, from the start of its packet.
POWERSGD_HOST_DEVICE inline int64_t place_of(const PacketLayout& layout, const PacketWords& words,
                                             int64_t index) {
  return index / words.per_chunk * layout.chunk_bytes + words.begin +
         index % words.per_chunk * words.bytes;
}

// The elements of a group, in the payload and in q_local.
struct GroupElements {
  int64_t count;
  int64_t payload_offset;
  int64_t stride;  // in the payload
  void* q_local;   // null for P
  int64_t q_offset;
};

// `group` counts from the factor's own first group.
POWERSGD_HOST_DEVICE inline GroupElements elements_of(const PacketFactor& factor, int64_t group) {
  const int64_t first = group / factor.rank * kGroup;
  const int64_t vector = group % factor.rank;
  const int64_t left = factor.size - first;
  return {left < kGroup ? left : kGroup,
          factor.offset + vector * factor.vector_stride + first * factor.element_stride,
          factor.element_stride, factor.q_local, vector * factor.size + first};
}

// Returns the index of the factor that has the group.
POWERSGD_HOST_DEVICE inline int32_t factor_of(const Packets& packets, int64_t group) {
  int32_t low = 0, high = packets.num_factors - 1;
  while (low < high) {
    const int32_t middle = (low + high + 1) / 2;
    if (packets.factors[middle].group_begin <= group) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

}  // namespace powersgd::kernels
