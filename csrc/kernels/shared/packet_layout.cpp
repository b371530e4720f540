// SPDX-License-Identifier: BSD-3-Clause
#include "kernels/shared/packet_layout.h"

#include <algorithm>

#include "kernels/shared/layout.h"

namespace powersgd::kernels {
namespace {

constexpr int64_t kSectionAlignment = 16;
constexpr int64_t kChunkAlignment = 64;

// Takes `bytes` of a chunk from `end` on, and returns where they begin.
int64_t take(int64_t& end, int64_t bytes) {
  const int64_t begin = end;
  end = round_up(end + bytes, kSectionAlignment);
  return begin;
}

PacketSection section_at(int64_t& end, int32_t chunks, WireDType dtype, int64_t groups) {
  PacketSection section{dtype, groups, std::max<int64_t>(1, ceil_div(groups, chunks)), 0, 0};
  const int64_t taken = groups == 0 ? 0 : section.groups_per_chunk;
  section.codes_at = take(end, taken * code_bytes(dtype));
  section.scales_at = take(end, has_scales(dtype) ? taken * 2 : 0);
  return section;
}

PacketWords words_at(int64_t& end, int32_t chunks, int64_t bytes, int64_t count) {
  const int64_t per_chunk = ceil_div(count, chunks);
  return {bytes, count, std::max<int64_t>(1, per_chunk), take(end, per_chunk * bytes)};
}

void append(PacketFactors& factors, PacketFactor factor) {
  factor.group_begin = factors.groups;
  factors.factors.push_back(factor);
  factors.groups += ceil_div(factor.size, kGroup) * factor.rank;
}

PacketFactors packet_factors(const std::vector<Matrix>& matrices,
                             PacketFactor (*factor_of_matrix)(const Matrix&)) {
  PacketFactors result;
  for (const Matrix& matrix : matrices) append(result, factor_of_matrix(matrix));
  return result;
}

// A factor as its memory holds it: P has a row for each element of a vector, Q one for each vector.
int64_t row_length(const PacketFactor& factor) {
  return factor.element_stride == 1 ? factor.size : factor.rank;
}

// The rows [begin, end) of a factor.
PacketFactor rows_of(PacketFactor factor, int64_t begin, int64_t end) {
  factor.offset += begin * row_length(factor);
  if (factor.element_stride == 1) {
    if (factor.q_local) factor.q_local = static_cast<float*>(factor.q_local) + begin * factor.size;
    factor.rank = end - begin;
  } else {
    factor.size = end - begin;
  }
  return factor;
}

// The elements [begin, end) of one row, as a vector.
PacketFactor part_of_row(const PacketFactor& factor, int64_t row, int64_t begin, int64_t end) {
  PacketFactor part = rows_of(factor, row, row + 1);
  part.offset += begin;
  if (part.q_local) part.q_local = static_cast<float*>(part.q_local) + begin;
  part.size = end - begin;
  part.rank = part.element_stride = part.vector_stride = 1;
  return part;
}

// Appends what [begin, end) has of one factor: whole rows, with a part of a row before and after.
void append_slice(PacketFactors& slice, const PacketFactor& factor, int64_t begin, int64_t end) {
  const int64_t length = row_length(factor);
  const int64_t first = ceil_div(begin, length), last = end / length;
  if (first > last) return append(slice, part_of_row(factor, last, begin % length, end % length));
  if (begin % length > 0) append(slice, part_of_row(factor, first - 1, begin % length, length));
  if (first < last) append(slice, rows_of(factor, first, last));
  if (end % length > 0) append(slice, part_of_row(factor, last, 0, end % length));
}

}  // namespace

int64_t group_bytes(WireDType dtype) { return code_bytes(dtype) + (has_scales(dtype) ? 2 : 0); }

DType raw_dtype_of(DType gradient_dtype) {
  return gradient_dtype == DType::kFloat16 ? DType::kFloat32 : gradient_dtype;
}

PacketLayout packet_layout(int32_t chunks, WireDType wire, int64_t factor_groups, DType raw_dtype,
                           int64_t raw_numel, int64_t flags) {
  PacketLayout layout{};
  int64_t end = 0;
  layout.chunks = chunks;
  layout.factors = section_at(end, chunks, wire, factor_groups);
  layout.raw = words_at(end, chunks, size_of(raw_dtype), raw_numel);
  layout.flags = words_at(end, chunks, 1, flags);
  layout.chunk_bytes = round_up(std::max<int64_t>(1, end), kChunkAlignment);
  return layout;
}

PacketFactors p_packet_factors(const std::vector<Matrix>& matrices) {
  return packet_factors(matrices, [](const Matrix& matrix) {
    return PacketFactor{matrix.p_offset, matrix.rows, matrix.rank, matrix.rank, 1, 0, nullptr};
  });
}

PacketFactors q_packet_factors(const std::vector<Matrix>& matrices) {
  return packet_factors(matrices, [](const Matrix& matrix) {
    return PacketFactor{matrix.q_offset, matrix.cols, matrix.rank,   1,
                        matrix.cols,     0,           matrix.q_local};
  });
}

PacketFactors slice_of(const PacketFactors& factors, int64_t begin, int64_t end) {
  PacketFactors slice;
  for (const PacketFactor& factor : factors.factors) {
    const int64_t numel = factor.size * factor.rank;
    const int64_t from = std::clamp<int64_t>(begin - factor.offset, 0, numel);
    const int64_t to = std::clamp<int64_t>(end - factor.offset, 0, numel);
    if (from < to) append_slice(slice, factor, from, to);
  }
  return slice;
}

}  // namespace powersgd::kernels
