// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace powersgd {

// Makes some all-reduces of a group in place of the inner backend: those that others, such as
// FSDP2, call on buffers that it knows.
class AllreduceTaker {
 public:
  virtual ~AllreduceTaker() = default;
  virtual bool expects(const at::Tensor& buffer) const = 0;
  // Makes the all-reduce of a buffer that it expects. Null if the caller is to make it, exactly.
  virtual c10::intrusive_ptr<c10d::Work> reduce_expected(const at::Tensor& buffer,
                                                         const c10d::AllreduceOptions& opts) = 0;
};

}  // namespace powersgd
