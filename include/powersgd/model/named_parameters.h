// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "powersgd/core/plan.h"

namespace powersgd {

// Says which tensor is which parameter of a model. A parameter's index is its place in the
// constructor's list, and its name is what a checkpoint calls it.
class NamedParameters {
 public:
  NamedParameters(std::vector<std::string> names, const std::vector<at::Tensor>& parameters,
                  const PatternRanks& ranks = {});

  size_t size() const { return parameters_.size(); }
  const std::vector<std::string>& names() const { return names_; }
  // A complex parameter as pairs of real numbers.
  const at::Tensor& operator[](size_t index) const { return parameters_[index]; }
  // The shape in memory, with the matrix rank of the pattern that its name has.
  ParameterShape shape(size_t index) const;
  // The devices of the parameters (several if the model is spread over them), and the first one.
  std::vector<c10::Device> devices() const;
  c10::Device device() const { return parameters_.empty() ? at::kCPU : parameters_[0].device(); }

  // Returns the indices of the constructor's own tensors. Throws for any other tensor.
  std::vector<size_t> find(const std::vector<at::Tensor>& parameters) const;
  std::optional<size_t> find_name(const std::string& name) const;
  // Throws if the parameter's memory layout has changed since the constructor.
  void check_layout(size_t index) const;

  // Returns views of the gradients that a bucket holds one after the other.
  std::vector<at::Tensor> split(const at::Tensor& bucket, const std::vector<size_t>& indices) const;

 private:
  std::vector<std::string> names_;
  std::vector<at::Tensor> parameters_;
  std::vector<std::vector<int64_t>> strides_;  // in the constructor; empty: contiguous
  std::vector<std::optional<int64_t>> ranks_;
  std::unordered_map<const c10::TensorImpl*, size_t> index_of_;
};

}  // namespace powersgd
