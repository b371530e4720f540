// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <vector>

#include "powersgd/options.h"

namespace powersgd {

// A weight as compression sees it: rows x cols, row-major in memory.
struct MatrixShape {
  int64_t rows = 0;
  int64_t cols = 0;
};

// One tensor of a bucket, in the order in which the bucket's memory holds them.
struct ParameterShape {
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;  // empty: contiguous

  int64_t numel() const;
};

// The matrix that a dense tensor's memory holds: the rows are the outermost dimension *in memory*,
// so that a channels_last weight keeps its output channels as rows. Fewer than two dimensions
// give one row.
MatrixShape matrix_shape(const ParameterShape& shape);

// The most nearly square matrix of `numel` elements or a few less: what does not fit (fewer than
// `cols` elements) is the tail, which is sent raw.
MatrixShape near_square_shape(int64_t numel);

// min(rank, rows, cols): the rank at which this matrix is compressed.
int64_t effective_rank(const MatrixShape& shape, const Options& options);

// Whether compression pays: (rows + cols) * r * min_compression_rate < rows * cols.
bool should_compress(const MatrixShape& shape, const Options& options);

// What a matrix sends in one step, in elements.
struct SentNumel {
  int64_t rank = 0;   // 0: the matrix is not compressed, and all of its elements travel raw
  int64_t p = 0;      // rows * rank
  int64_t q = 0;      // rank * cols
  int64_t total = 0;  // all that travels; a mean of two steps where P and Q are sent in turns
};

// `total` leaves out the non-finite count, which a bucket sends once.
SentNumel sent_numel(const MatrixShape& shape, const Options& options);

struct PlannedMatrix {
  int64_t parameter;  // index into the bucket's parameters
  MatrixShape shape;
  int64_t rank;
  int64_t gradient_offset;  // all offsets in elements
  int64_t p_offset;         // [rows, rank] in the P payload
  int64_t q_offset;         // [rank, cols] in the Q payload
  int64_t active_offset;    // in the P payload: whether the gradient has a non-zero element
};

// Neighbouring raw parameters are merged into one segment.
struct PlannedRaw {
  int64_t gradient_offset;
  int64_t numel;
  int64_t p_offset;
};

// What travels for one bucket:
//   P payload = [ P of each matrix | raw segments | activity of each matrix | non-finite count ]
//   Q payload = [ q of each matrix ]
struct BucketPlan {
  std::vector<PlannedMatrix> matrices;
  std::vector<PlannedRaw> raw;
  int64_t gradient_numel = 0;
  int64_t p_numel = 0;
  int64_t q_numel = 0;

  // Where in the P payload the raw segments begin, and what is counted.
  int64_t raw_offset() const { return raw.empty() ? counts_offset() : raw.front().p_offset; }
  int64_t counts_offset() const { return p_numel - 1 - static_cast<int64_t>(matrices.size()); }

  // A bucket without a matrix is forwarded whole, exactly, in one collective.
  bool compresses() const { return !matrices.empty(); }
};

// `bucket` holds the parameters back to back.
BucketPlan plan_bucket(const std::vector<ParameterShape>& bucket, const Options& options);

// A flat tensor of unknown structure: one near-square matrix and its tail.
BucketPlan plan_flat(int64_t numel, const Options& options);

}  // namespace powersgd
