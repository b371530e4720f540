// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace powersgd {

// Takes over some of a group's all-reduces from the inner backend: those that other code, such as
// FSDP2, calls on buffers that the taker knows.
class AllreduceTaker {
 public:
  virtual ~AllreduceTaker() = default;
  virtual bool expects(const at::Tensor& buffer) const = 0;
  // All-reduces a buffer that the taker expects. Null if the caller should do so, exactly.
  virtual c10::intrusive_ptr<c10d::Work> reduce_expected(const at::Tensor& buffer,
                                                         const c10d::AllreduceOptions& opts) = 0;
};

}  // namespace powersgd
