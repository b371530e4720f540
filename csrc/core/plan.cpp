// SPDX-License-Identifier: BSD-3-Clause
#include "powersgd/core/plan.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace powersgd {
namespace {

// The columns of a large near-square matrix are a multiple of this, so every row is aligned for
// vector loads. A small matrix would lose its shape to the rounding.
constexpr int64_t kColumnAlignment = 16;
constexpr int64_t kAlignedFrom = 256;

// Returns the dimension with the largest stride. A dimension of size 1 has an arbitrary stride and
// so no place in memory: it counts only if no other dimension is left to be the columns.
size_t outermost_dimension(const ParameterShape& shape) {
  if (shape.strides.empty()) {
    const auto first = std::find_if(shape.sizes.begin(), shape.sizes.end(),
                                    [](int64_t size) { return size != 1; });
    return static_cast<size_t>(first - shape.sizes.begin());
  }
  size_t outermost = shape.sizes.size();
  for (size_t i = 0; i < shape.sizes.size(); ++i) {
    if (shape.sizes[i] == 1) continue;
    if (outermost == shape.sizes.size() || shape.strides[i] > shape.strides[outermost]) {
      outermost = i;
    }
  }
  return outermost;
}

int64_t integer_sqrt(int64_t value) {
  auto root = static_cast<int64_t>(std::sqrt(static_cast<double>(value)));
  while (root * root > value) --root;
  while ((root + 1) * (root + 1) <= value) ++root;
  return root;
}

// Lays out the payloads in the order in which parameters arrive.
class Planner {
 public:
  void add_matrix(int64_t parameter, const MatrixShape& shape, const SentNumel& sent) {
    plan_.matrices.push_back(
        {parameter, shape, sent.rank, plan_.gradient_numel, plan_.p_numel, plan_.q_numel, 0});
    plan_.gradient_numel += shape.rows * shape.cols;
    plan_.p_numel += sent.p;
    plan_.q_numel += sent.q;
  }

  void add_raw(int64_t numel) {
    if (numel == 0) return;
    const int64_t offset = plan_.gradient_numel;
    plan_.gradient_numel += numel;
    if (!plan_.raw.empty() && plan_.raw.back().gradient_offset + plan_.raw.back().numel == offset) {
      plan_.raw.back().numel += numel;
    } else {
      plan_.raw.push_back({offset, numel, 0});
    }
  }

  // The raw segments follow all the matrices, then the uses; the non-finite count comes last.
  BucketPlan finish() {
    for (PlannedRaw& raw : plan_.raw) {
      raw.p_offset = plan_.p_numel;
      plan_.p_numel += raw.numel;
    }
    for (PlannedMatrix& matrix : plan_.matrices) matrix.use_offset = plan_.p_numel++;
    plan_.p_numel += 1;
    return std::move(plan_);
  }

 private:
  BucketPlan plan_;
};

}  // namespace

int64_t ParameterShape::numel() const {
  int64_t product = 1;
  for (const int64_t size : sizes) product *= size;
  return product;
}

MatrixShape matrix_shape(const ParameterShape& shape) {
  const auto wide =
      std::count_if(shape.sizes.begin(), shape.sizes.end(), [](int64_t size) { return size != 1; });
  if (shape.sizes.size() < 2) return {1, shape.numel()};
  const size_t outermost = wide < 2 ? 0 : outermost_dimension(shape);
  MatrixShape matrix{shape.sizes[outermost], 1};
  for (size_t i = 0; i < shape.sizes.size(); ++i) {
    if (i != outermost) matrix.cols *= shape.sizes[i];
  }
  return matrix;
}

MatrixShape near_square_shape(int64_t numel) {
  if (numel <= 0) return {0, 0};
  int64_t cols = integer_sqrt(numel);
  if (cols >= kAlignedFrom) {
    cols = (cols + kColumnAlignment - 1) / kColumnAlignment * kColumnAlignment;
  }
  return {numel / cols, cols};
}

int64_t effective_rank(const ParameterShape& shape, const Options& options) {
  const MatrixShape matrix = matrix_shape(shape);
  const int64_t rank = shape.rank.value_or(options.matrix_approximation_rank);
  return std::min({rank, matrix.rows, matrix.cols});
}

bool should_compress(const ParameterShape& shape, const Options& options) {
  const int64_t rank = effective_rank(shape, options);
  if (shape.exact || rank == 0) return false;
  const MatrixShape matrix = matrix_shape(shape);
  const auto factors = static_cast<double>((matrix.rows + matrix.cols) * rank);
  return factors * options.min_compression_rate < static_cast<double>(matrix.rows * matrix.cols);
}

SentNumel sent_numel(const ParameterShape& shape, const Options& options) {
  SentNumel sent;
  if (!should_compress(shape, options)) {
    sent.total = shape.numel();
    return sent;
  }
  const MatrixShape matrix = matrix_shape(shape);
  sent.rank = effective_rank(shape, options);
  sent.p = matrix.rows * sent.rank;
  sent.q = matrix.cols * sent.rank;
  sent.total = sent.p + sent.q + 1;  // the use
  return sent;
}

BucketPlan plan_bucket(const std::vector<ParameterShape>& bucket, const Options& options) {
  Planner planner;
  for (size_t i = 0; i < bucket.size(); ++i) {
    const SentNumel sent = sent_numel(bucket[i], options);
    if (sent.rank > 0) {
      planner.add_matrix(static_cast<int64_t>(i), matrix_shape(bucket[i]), sent);
    } else {
      planner.add_raw(sent.total);
    }
  }
  return planner.finish();
}

BucketPlan plan_flat(int64_t numel, const Options& options) {
  Planner planner;
  const MatrixShape shape = near_square_shape(numel);
  const SentNumel sent = sent_numel({{shape.rows, shape.cols}, {}}, options);
  if (sent.rank > 0) planner.add_matrix(0, shape, sent);
  planner.add_raw(sent.rank > 0 ? numel - shape.rows * shape.cols : numel);
  return planner.finish();
}

}  // namespace powersgd
