// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <vector>

#include "kernels/shared/layout.h"
#include "kernels/shared/packet_layout.h"

namespace powersgd::kernels {
namespace {

constexpr WireDType kWireDTypes[] = {WireDType::kBFloat16, WireDType::kInt8, WireDType::kInt4};

// The bytes of a packet, each of which has one purpose.
class Bytes {
 public:
  explicit Bytes(const PacketLayout& layout) : taken_(static_cast<size_t>(layout.bytes())) {}

  void take(int64_t begin, int64_t count) {
    ASSERT_GE(begin, 0);
    ASSERT_LE(begin + count, static_cast<int64_t>(taken_.size()));
    for (int64_t i = begin; i < begin + count; ++i) {
      EXPECT_FALSE(taken_[static_cast<size_t>(i)]) << "byte " << i << " is taken twice";
      taken_[static_cast<size_t>(i)] = true;
    }
  }

  void take_groups(const PacketLayout& layout) {
    const PacketSection& section = layout.factors;
    EXPECT_EQ(section.codes_at % 16, 0);
    EXPECT_EQ(section.scales_at % 16, 0);
    for (int64_t i = 0; i < section.groups; ++i) {
      const GroupPlace place = place_of(layout, i);
      take(place.codes, code_bytes(section.dtype));
      if (has_scales(section.dtype)) take(place.scale, 2);
      const int64_t chunk = i / section.groups_per_chunk;
      EXPECT_EQ(place.codes / layout.chunk_bytes, chunk);
    }
  }

  void take_words(const PacketLayout& layout, const PacketWords& words) {
    EXPECT_EQ(words.begin % 16, 0);
    for (int64_t i = 0; i < words.count; ++i) {
      const int64_t place = place_of(layout, words, i);
      take(place, words.bytes);
      EXPECT_EQ(place / layout.chunk_bytes, i / words.per_chunk);
    }
  }

 private:
  std::vector<bool> taken_;
};

TEST(PacketLayout, EveryByteHasOnePurpose) {
  for (const WireDType dtype : kWireDTypes) {
    for (const int32_t chunks : {1, 2, 3, 9}) {
      for (const int64_t size : {0, 1, 8, 9, 10, 100}) {
        for (const DType raw : {DType::kFloat32, DType::kBFloat16}) {
          const PacketLayout layout =
              packet_layout(chunks, dtype, size, raw, 7 * size + 1, size / 2);
          EXPECT_EQ(layout.chunk_bytes % 64, 0);
          Bytes bytes(layout);
          bytes.take_groups(layout);
          bytes.take_words(layout, layout.raw);
          bytes.take_words(layout, layout.flags);
        }
      }
    }
  }
}

// A group of 64 elements takes 64 codes, and two bytes for its scale. A raw element is a word.
TEST(PacketLayout, HasTheBytesOfItsCodes) {
  const auto bytes_of = [](WireDType dtype) {
    return packet_layout(1, dtype, 1024, DType::kFloat32, 0, 0).bytes();
  };
  EXPECT_EQ(bytes_of(WireDType::kBFloat16), 1024 * 64 * 2);
  EXPECT_EQ(bytes_of(WireDType::kInt8), 1024 * (64 + 2));
  EXPECT_EQ(bytes_of(WireDType::kInt4), 1024 * (32 + 2));
  for (const DType raw : {DType::kFloat32, DType::kBFloat16}) {
    EXPECT_EQ(packet_layout(1, WireDType::kInt4, 0, raw, 4096, 0).bytes(), 4096 * size_of(raw));
  }
}

TEST(PacketLayout, FactorsAreFoundByTheirGroups) {
  std::vector<Matrix> matrices;
  for (const auto& [rows, rank] : {std::pair{130, 3}, {0, 0}, {64, 0}, {1, 1}, {65, 2}, {7, 0}}) {
    Matrix matrix{};
    matrix.rows = rows;
    matrix.rank = rank;
    matrices.push_back(matrix);
  }
  const PacketFactors table = p_packet_factors(matrices);
  EXPECT_EQ(table.groups, 3 * 3 + 1 + 2 * 2);
  Packets packets{};
  packets.factors = table.factors.data();
  packets.num_factors = static_cast<int32_t>(table.factors.size());
  for (int64_t group = 0; group < table.groups; ++group) {
    EXPECT_EQ(factor_of(packets, group), group < 9 ? 0 : group < 10 ? 3 : 4) << group;
  }
}

// Slices begin and end inside rows, and may have nothing of a matrix, or only a part of one row.
TEST(PacketSlices, HaveEveryElementOnce) {
  constexpr std::array<std::array<int64_t, 3>, 6> kShapes{
      {{130, 70, 3}, {1, 5, 1}, {64, 64, 64}, {7, 300, 2}, {200, 3, 1}, {5, 4, 4}}};
  for (const bool is_q : {false, true}) {
    std::vector<Matrix> matrices;
    int64_t numel = 0;
    for (const auto& [rows, cols, rank] : kShapes) {
      Matrix matrix{};
      matrix.rows = rows;
      matrix.cols = cols;
      matrix.rank = rank;
      matrix.p_offset = matrix.q_offset = numel;
      numel += (is_q ? cols : rows) * rank;
      matrices.push_back(matrix);
    }
    std::vector<float> q_local(static_cast<size_t>(numel));
    if (is_q) {
      for (Matrix& matrix : matrices) matrix.q_local = q_local.data() + matrix.q_offset;
    }
    const PacketFactors whole = is_q ? q_packet_factors(matrices) : p_packet_factors(matrices);
    EXPECT_EQ(slice_of(whole, 0, numel).groups, whole.groups);
    for (const int64_t length : {numel, numel / 2, int64_t{97}, int64_t{64}, int64_t{3}}) {
      std::vector<int> times(static_cast<size_t>(numel));
      for (int64_t begin = 0; begin < numel; begin += length) {
        const int64_t end = std::min(numel, begin + length);
        const PacketFactors slice = slice_of(whole, begin, end);
        int64_t groups = 0;
        for (const PacketFactor& factor : slice.factors) {
          EXPECT_EQ(factor.group_begin, groups);
          const int64_t of_factor = ceil_div(factor.size, kGroup) * factor.rank;
          groups += of_factor;
          for (int64_t group = 0; group < of_factor; ++group) {
            const GroupElements elements = elements_of(factor, group);
            for (int64_t i = 0; i < elements.count; ++i) {
              const int64_t place = elements.payload_offset + i * elements.stride;
              ASSERT_TRUE(begin <= place && place < end);
              ++times[static_cast<size_t>(place)];
              if (!is_q) continue;
              const float* own = static_cast<float*>(elements.q_local) + elements.q_offset + i;
              EXPECT_EQ(own - q_local.data(), place);
            }
          }
        }
        EXPECT_EQ(groups, slice.groups);
      }
      EXPECT_EQ(times, std::vector<int>(times.size(), 1)) << "slices of " << length;
    }
  }
}

}  // namespace
}  // namespace powersgd::kernels
