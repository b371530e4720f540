// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

namespace powersgd {

// Where a tensor lies. The weak reference keeps its address from being used again.
class BufferPlace {
 public:
  explicit BufferPlace(const at::Tensor& tensor)
      : storage_(tensor.storage().getWeakStorageImpl()), offset_(tensor.storage_offset()) {}

  bool is_of(const at::Tensor& tensor) const {
    return storage_._unsafe_get_target() == tensor.storage().unsafeGetStorageImpl() &&
           offset_ == tensor.storage_offset();
  }

 private:
  c10::weak_intrusive_ptr<c10::StorageImpl> storage_;
  int64_t offset_;
};

}  // namespace powersgd
