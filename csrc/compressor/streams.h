// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace powersgd {

// Keeps the memory of a tensor of another stream until the current stream is done with it too.
inline void use_on_current_stream(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.is_cpu()) return;
  const c10::impl::VirtualGuardImpl impl(tensor.device().type());
  impl.recordDataPtrOnStream(tensor.storage().data_ptr(), impl.getStream(tensor.device()));
}

}  // namespace powersgd
