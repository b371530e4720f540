// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "compressor/bucket_tables.h"
#include "powersgd/compressor/parameter_state.h"
#include "powersgd/core/plan.h"

namespace powersgd {

// What a bucket's device has no kernels for (Stages::multiplies): its products, by torch's, and its
// whole orthogonalize and back_project. The host never waits. Temporaries come from torch's
// allocator.
class TorchProducts {
 public:
  // `states[i]` belongs to `plan.matrices[i]`. `skipped` is BucketTables::skipped().
  TorchProducts(const BucketPlan& plan, const std::vector<ParameterStatePtr>& states,
                const Payloads& payloads, at::Tensor skipped, double epsilon);

  // Before the kernel of project, makes memory the residual. Afterwards, computes P.
  void subtract_sent() const;
  void project(const at::Tensor& gradient) const;
  void orthogonalize() const;
  void back_project(const at::Tensor& gradient) const;
  // Adds the output to what the kernel of reconstruct has left: zeros, or NaN in a skipped step.
  void reconstruct(const at::Tensor& gradient, double output_scale) const;

 private:
  struct Matrix {
    PlannedMatrix plan;
    ParameterStatePtr state;
    at::Tensor p, q;  // in the payloads
    at::Tensor use;   // in the P payload; undefined: always used

    at::Tensor gradient_of(const at::Tensor& bucket) const;
    at::Tensor m(const at::Tensor& bucket) const;  // in float32
    at::Tensor sends_nothing(const at::Tensor& skipped) const;
  };

  std::vector<Matrix> matrices_;
  at::Tensor all_p_, non_finite_count_;  // in the P payload
  at::Tensor skipped_;
  double epsilon_;
};

// Returns an orthonormal basis of the columns of `p`, where columns that depend on those before
// them are 0, in float64.
at::Tensor orthonormal(const at::Tensor& p, double epsilon);

}  // namespace powersgd
