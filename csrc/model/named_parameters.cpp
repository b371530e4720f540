// SPDX-License-Identifier: BSD-3-Clause
#include "powersgd/model/named_parameters.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "model/parameter_layout.h"

namespace powersgd {

NamedParameters::NamedParameters(std::vector<std::string> names,
                                 const std::vector<at::Tensor>& parameters,
                                 const PatternRanks& ranks)
    : names_(std::move(names)), parameters_(as_reals(parameters)) {
  TORCH_CHECK(names_.size() == parameters_.size(), "powersgd: ", names_.size(), " names for ",
              parameters_.size(), " parameters");
  for (size_t i = 0; i < parameters_.size(); ++i) {
    strides_.push_back(memory_layout(parameters_[i]).strides);
    ranks_.push_back(rank_of(names_[i], ranks));
    index_of_[parameters[i].unsafeGetTensorImpl()] = i;
  }
}

ParameterShape NamedParameters::shape(size_t index) const {
  ParameterShape shape = memory_layout(parameters_[index]);
  shape.rank = ranks_[index];
  return shape;
}

std::vector<c10::Device> NamedParameters::devices() const {
  std::vector<c10::Device> devices;
  for (const at::Tensor& parameter : parameters_) {
    if (std::find(devices.begin(), devices.end(), parameter.device()) == devices.end()) {
      devices.push_back(parameter.device());
    }
  }
  return devices;
}

std::vector<size_t> NamedParameters::find(const std::vector<at::Tensor>& parameters) const {
  std::vector<size_t> indices;
  for (const at::Tensor& parameter : parameters) {
    const auto found = index_of_.find(parameter.unsafeGetTensorImpl());
    TORCH_CHECK(found != index_of_.end(),
                "powersgd: DDP reduces a parameter that the model did not have in attach; wrap the "
                "changed model in a new DDP module and attach that");
    check_layout(found->second);
    indices.push_back(found->second);
  }
  return indices;
}

std::optional<size_t> NamedParameters::find_name(const std::string& name) const {
  const auto found = std::find(names_.begin(), names_.end(), name);
  if (found == names_.end()) return std::nullopt;
  return static_cast<size_t>(found - names_.begin());
}

// A state has the layout at attach; DDP's buckets have the layout when they were built or rebuilt.
void NamedParameters::check_layout(size_t index) const {
  TORCH_CHECK(memory_layout(parameters_[index]).strides == strides_[index],
              "powersgd: the memory layout of '", names_[index],
              "' has changed since attach; convert the model before DDP wraps it");
}

std::vector<at::Tensor> NamedParameters::split(const at::Tensor& bucket,
                                               const std::vector<size_t>& indices) const {
  std::vector<int64_t> sizes;
  for (const size_t index : indices) sizes.push_back(parameters_[index].numel());
  return bucket.split_with_sizes(sizes);
}

}  // namespace powersgd
