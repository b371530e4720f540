// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <vector>

#include "powersgd/compressor/compressor.h"

namespace powersgd::test {

// A bucket with a matrix, a bias and another matrix, or with other shapes. step() takes it for a
// group of one rank, in which sums over ranks change nothing.
class OneRank {
 public:
  explicit OneRank(const Options& options, at::ScalarType type = at::kFloat,
                   at::Device device = at::kCPU, Ranks ranks = {},
                   const std::vector<ParameterShape>& shapes = {{{17, 33}, {}},
                                                                {{5}, {}},
                                                                {{40, 24}, {}}})
      : plan(plan_bucket(shapes, options)) {
    for (size_t i = 0; i < plan.matrices.size(); ++i) {
      states.push_back(std::make_shared<ParameterState>(i));
    }
    compressor = make_compressor(plan, states, options, type, device, ranks);
  }

  // Returns the output.
  at::Tensor step(const at::Tensor& gradient, const StepInfo& info = {}) {
    at::Tensor out = gradient.clone();
    sum_alone(compressor->project(out, info));
    compressor->orthogonalize();
    sum_alone(compressor->back_project());
    compressor->reconstruct();
    return out;
  }

  // Returns the residuals in the layout of the bucket.
  at::Tensor residuals() const {
    at::Tensor all = at::zeros({plan.gradient_numel}, at::kDouble);
    for (size_t i = 0; i < states.size(); ++i) {
      const at::Tensor e = states[i]->residual().to(at::kDouble).flatten();
      all.narrow(0, plan.matrices[i].gradient_offset, e.numel()).copy_(e);
    }
    return all;
  }

  static constexpr int64_t kBias = 17 * 33, kBiasNumel = 5;  // in the gradient
  BucketPlan plan;
  std::vector<ParameterStatePtr> states;
  std::shared_ptr<BucketCompressor> compressor;
};

// Returns the distance of a from b, in the Frobenius norm, relative to the norm of b.
inline double relative(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor difference = a.to(at::kDouble) - b.to(at::kDouble);
  return (difference.norm() / b.to(at::kDouble).norm()).item<double>();
}

}  // namespace powersgd::test
