// SPDX-License-Identifier: BSD-3-Clause
#include "model/parameter_layout.h"

#include <ATen/ATen.h>

#include <vector>

#include "powersgd/compressor/dtypes.h"

namespace powersgd {
namespace {

// [rank] rows, each of the shape of `parameter` without its outermost dimension in memory.
struct RowLayout {
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
};

RowLayout row_layout(const at::Tensor& parameter, int64_t rank) {
  const ParameterShape shape = memory_layout(parameter);
  const MatrixShape matrix = matrix_shape(shape);
  RowLayout layout{{rank}, {matrix.cols}};
  bool skipped = false;
  for (size_t d = 0; d < shape.sizes.size(); ++d) {
    const bool outermost =
        shape.sizes[d] == matrix.rows && (shape.strides.empty() || shape.strides[d] == matrix.cols);
    if (outermost && !skipped) {
      skipped = true;
      continue;
    }
    layout.sizes.push_back(shape.sizes[d]);
    if (!shape.strides.empty()) layout.strides.push_back(shape.strides[d]);
  }
  return layout;
}

}  // namespace

std::vector<at::Tensor> as_reals(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> reals = parameters;
  for (at::Tensor& parameter : reals) {
    if (!parameter.is_complex()) continue;
    parameter = at::view_as_real(parameter.detach()).set_requires_grad(parameter.requires_grad());
  }
  return reals;
}

ParameterShape memory_layout(const at::Tensor& parameter) {
  ParameterShape shape{parameter.sizes().vec(), {}, !is_compressible(parameter.scalar_type())};
  // DDP's rule: the parameter's own strides if it is dense, else contiguous.
  if (parameter.is_non_overlapping_and_dense() && !parameter.is_contiguous()) {
    shape.strides = parameter.strides().vec();
  }
  return shape;
}

at::Tensor to_parameter_order(const at::Tensor& matrix, const at::Tensor& parameter) {
  const ParameterShape shape = memory_layout(parameter);
  if (shape.strides.empty()) return matrix.reshape(parameter.sizes());
  return matrix.contiguous().as_strided(shape.sizes, shape.strides).contiguous();
}

at::Tensor to_memory_order(const at::Tensor& tensor, const at::Tensor& parameter) {
  const ParameterShape shape = memory_layout(parameter);
  const MatrixShape matrix = matrix_shape(shape);
  if (shape.strides.empty()) return tensor.reshape({matrix.rows, matrix.cols});
  at::Tensor laid_out = at::empty({matrix.rows, matrix.cols}, tensor.options());
  laid_out.as_strided(shape.sizes, shape.strides).copy_(tensor);
  return laid_out;
}

at::Tensor q_to_parameter_order(const at::Tensor& q, const at::Tensor& parameter) {
  const RowLayout layout = row_layout(parameter, q.size(0));
  if (layout.strides.size() != layout.sizes.size()) return q;
  return q.contiguous().as_strided(layout.sizes, layout.strides).reshape({q.size(0), -1});
}

at::Tensor q_to_memory_order(const at::Tensor& q, const at::Tensor& parameter) {
  const RowLayout layout = row_layout(parameter, q.size(0));
  if (layout.strides.size() != layout.sizes.size()) return q;
  at::Tensor laid_out = at::empty_like(q, at::MemoryFormat::Contiguous);
  laid_out.as_strided(layout.sizes, layout.strides).copy_(q.reshape(layout.sizes));
  return laid_out;
}

}  // namespace powersgd
