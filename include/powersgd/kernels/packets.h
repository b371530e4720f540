// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <vector>

#include "powersgd/core/options.h"
#include "powersgd/kernels/kernels.h"

// How a payload travels if its wire dtype is not float32.
//
// A packet is a payload in the wire dtype. Integers cannot be added on the wire, and floats would
// be rounded there, so ranks exchange packets and add them themselves, in one of two schedules:
//
//   one-shot   quantize ; all-gather the packets ; dequantize their sum
//   two-shot   quantize ; all-to-all: rank k, the owner of chunk k, gets chunk k of every packet ;
//              requantize their sum ; all-gather the sums ; dequantize
//
// A one-shot packet has one chunk, and a two-shot packet one for each rank. A single rank uses the
// one-shot schedule.
//
//   chunk = [ codes of the factors | scales | raw elements | flags ]
//
// Factors are cut into groups of 64 elements. Raw elements travel in their own dtype, except that
// float16 travels as float32, because its sums may exceed 65504. Flags are bytes. All chunks have
// equally many groups, raw elements and flags; the last ones may be padding.
//
// Contract, the same on the CPU and on CUDA:
//   - quantize and requantize round to nearest, ties to even.
//   - An element of int8 or int4 is code * scale, with codes in [-127, 127] or [-7, 7]. The scale
//     of a group is its largest magnitude over 127 or 7, rounded up to bfloat16. Elements of
//     bfloat16 have no scale.
//   - A finite value beyond the largest of float or of the wire dtype counts as that largest value.
//   - code * scale is exact in float, because no scale has more than 8 significant bits.
//   - A group whose scale would be below the smallest normal float has scale 0: its elements count
//     as 0. A group with an element that is not finite sums to NaN, if its dtype has scales.
//   - Sums are computed in float, in the order of the ranks, so all ranks get the same
//     bits. requantize rounds sums of raw elements to their dtype.
//   - quantize sets q_local to the value that was sent. If the payload is the sum of a host's
//     ranks, it gives this rank the rounding of the sum: q_local += (what was sent) - (the sum).
//   - requantize gives the owner the rounding of the sum, for the factors of its chunk: q_local +=
//     (new sum) - (exact sum). The local q of all ranks then add up to the Q that all apply.
//   - A q_local that would not be finite stays as it was: such a step is skipped.
//   - A flag is 1 if the payload's element is not 0. requantize sets it to 1 if any rank's is 1.
//     dequantize writes the sum of the flags that it reads: one-shot, those of all ranks.
namespace powersgd::kernels {

constexpr int64_t kGroup = 64;  // elements that share a scale

// The bytes of a group: its codes, and its scale if the dtype has scales.
int64_t group_bytes(WireDType dtype);

// The groups of the factors in a packet.
struct PacketSection {
  WireDType dtype;
  int64_t groups;            // of the whole packet, without padding
  int64_t groups_per_chunk;  // the last chunk has padding
  int64_t codes_at;          // offsets in bytes from the start of a chunk, multiples of 16
  int64_t scales_at;         // bfloat16, one for each group, if the dtype has scales
};

// The raw elements or the flags in a packet.
struct PacketWords {
  int64_t bytes;      // of each
  int64_t count;      // in the whole packet, without padding
  int64_t per_chunk;  // the last chunk has padding
  int64_t begin;      // offset in bytes from the start of a chunk, a multiple of 16
};

struct PacketLayout {
  int32_t chunks;
  PacketSection factors;
  PacketWords raw;
  PacketWords flags;
  int64_t chunk_bytes;  // a multiple of 64

  int64_t bytes() const { return chunks * chunk_bytes; }
};

// The dtype in which raw elements travel: float32 or bfloat16.
DType raw_dtype_of(DType gradient_dtype);

// Lays out the packets of a payload with these numbers of groups, raw elements and flags.
PacketLayout packet_layout(int32_t chunks, WireDType wire, int64_t factor_groups, DType raw_dtype,
                           int64_t raw_numel, int64_t flags);

// P or Q of one matrix in a payload: `rank` vectors (columns of P, rows of Q) of `size` elements.
// Element i of vector k is at offset + k * vector_stride + i * element_stride. Elements [64 b,
// 64 b + 64) of vector k are group group_begin + b * rank + k; the last group may have fewer.
struct PacketFactor {
  int64_t offset;
  int64_t size;
  int64_t rank;
  int64_t element_stride;
  int64_t vector_stride;
  int64_t group_begin;
  void* q_local;  // [rank, size] in float32; null for P
};

// Returns the factors of the P or of the Q payload on the host, with the number of their groups.
struct PacketFactors {
  std::vector<PacketFactor> factors;
  int64_t groups = 0;
};
PacketFactors p_packet_factors(const std::vector<Matrix>& matrices);
PacketFactors q_packet_factors(const std::vector<Matrix>& matrices);

// Returns the parts of the factors that lie in the elements [begin, end) of the payload, which may
// begin and end anywhere.
PacketFactors slice_of(const PacketFactors& factors, int64_t begin, int64_t end);

// Everything that the three functions read. All pointers are in memory of the device.
struct Packets {
  PacketLayout layout;
  const PacketFactor* factors;  // in the order of their groups
  int32_t num_factors;

  DType raw_dtype;     // of raw elements in packets: float32 or bfloat16
  void* payload;       // float32: [ factors | raw segments | flags ]
  int64_t raw_offset;  // in the payload, of the raw segments; the flags follow them
  bool of_host;        // the payload is the sum of a host's ranks

  int32_t ranks;
  int32_t own_chunk;  // two-shot: this rank's number
  uint8_t* sent;      // layout.bytes(): the packet of this rank, and at the end of two-shot the sum
  uint8_t* received;  // one-shot: the packets of all ranks. Two-shot: their chunks `own_chunk`
  uint8_t* reduced;   // two-shot: chunk `own_chunk` of the sum
};

namespace cpu {

void quantize(const Packets& packets, const ParallelFor& parallel_for);    // payload -> sent
void requantize(const Packets& packets, const ParallelFor& parallel_for);  // received -> reduced
// One-shot: received -> payload. Two-shot: sent -> payload.
void dequantize(const Packets& packets, const ParallelFor& parallel_for);

}  // namespace cpu

namespace cuda {

Status quantize(const Packets& packets, Stream stream);
Status requantize(const Packets& packets, Stream stream);
Status dequantize(const Packets& packets, Stream stream);

}  // namespace cuda

}  // namespace powersgd::kernels
