// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "powersgd/core/options.h"

namespace powersgd {

// The matrix of a parameter: rows x cols, row-major in memory.
struct MatrixShape {
  int64_t rows = 0;
  int64_t cols = 0;
};

// One tensor of a bucket, in the order in which the bucket's memory holds them.
struct ParameterShape {
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;                // empty: contiguous
  bool exact = false;                          // sent whole, because its dtype is not compressed
  std::optional<int64_t> rank = std::nullopt;  // its own matrix rank; 0: sent whole

  int64_t numel() const;
};

// The matrix that a dense tensor's memory holds. The rows are the outermost dimension *in memory*,
// so a channels_last weight keeps its output channels as rows. Fewer than two dimensions give one
// row.
MatrixShape matrix_shape(const ParameterShape& shape);

// The most nearly square matrix of `numel` elements. The remaining elements, fewer than `cols`, are
// the tail, which is sent raw.
MatrixShape near_square_shape(int64_t numel);

// The rank at which a parameter's matrix is compressed: min(rank, rows, cols).
int64_t effective_rank(const ParameterShape& shape, const Options& options);

// True if compression pays: (rows + cols) * r * min_compression_rate < rows * cols. False if the
// parameter is exact or has rank 0.
bool should_compress(const ParameterShape& shape, const Options& options);

// The elements that a parameter sends in one step.
struct SentNumel {
  int64_t rank = 0;   // 0 if it is not compressed: all of its elements travel raw
  int64_t p = 0;      // rows * rank
  int64_t q = 0;      // rank * cols
  int64_t total = 0;  // all elements, including the use
};

// The total has no non-finite count, because a bucket sends only one.
SentNumel sent_numel(const ParameterShape& shape, const Options& options);

// A compressed parameter. All offsets count elements.
struct PlannedMatrix {
  int64_t parameter;  // index into the bucket's parameters
  MatrixShape shape;
  int64_t rank;
  int64_t gradient_offset;
  int64_t p_offset;    // [rows, rank] in the P payload
  int64_t q_offset;    // [rank, cols] in the Q payload
  int64_t use_offset;  // in the P payload: 1 if this rank has used the parameter; -1: nowhere
};

// Neighboring parameters that travel uncompressed: one raw segment.
struct PlannedRaw {
  int64_t gradient_offset;
  int64_t numel;
  int64_t p_offset;
};

// The layout of one bucket and of its payloads:
//   P payload = [ P of each matrix | raw segments | use of each matrix | non-finite count ]
//   Q payload = [ q of each matrix ]
struct BucketPlan {
  std::vector<PlannedMatrix> matrices;
  std::vector<PlannedRaw> raw;
  int64_t gradient_numel = 0;
  int64_t p_numel = 0;
  int64_t q_numel = 0;

  // The offsets in the P payload at which the raw segments begin, and the counts after them.
  int64_t raw_offset() const { return raw.empty() ? counts_offset() : raw.front().p_offset; }
  int64_t counts_offset() const { return p_numel - 1 - static_cast<int64_t>(matrices.size()); }
  int64_t raw_numel() const { return counts_offset() - raw_offset(); }

  // A bucket without a matrix is forwarded whole and exactly, in one collective.
  bool compresses() const { return !matrices.empty(); }
};

// Plans a bucket that holds the parameters back to back.
BucketPlan plan_bucket(const std::vector<ParameterShape>& bucket, const Options& options);

// Plans a flat tensor of unknown structure: one near-square matrix and its tail.
BucketPlan plan_flat(int64_t numel, const Options& options);

}  // namespace powersgd
