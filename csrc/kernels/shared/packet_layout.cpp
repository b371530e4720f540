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

PacketFactors packet_factors(const std::vector<Matrix>& matrices,
                             PacketFactor (*factor_of_matrix)(const Matrix&)) {
  PacketFactors result;
  for (const Matrix& matrix : matrices) {
    PacketFactor& factor = result.factors.emplace_back(factor_of_matrix(matrix));
    factor.group_begin = result.groups;
    result.groups += ceil_div(factor.size, kGroup) * factor.rank;
  }
  return result;
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
  layout.chunk_bytes = round_up(end, kChunkAlignment);
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

}  // namespace powersgd::kernels
