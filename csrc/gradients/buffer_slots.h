// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace powersgd {

// Tells apart the buffers that take turns at being the tensor of one order, shape and dtype:
// buckets of several models that look alike. What it says holds for this rank alone: nothing may
// depend on it that ranks must agree upon.
//
// A buffer has a slot of its own once it has come back after others. One that is seen for the first
// time (DDP has rebuilt its buckets, or the caller makes a new tensor each time) takes over the
// slot of one that is gone, else the last one's if that has not come back yet. So models that look
// alike need two passes each until all have slots.
//
// Not thread-safe.
class BufferSlots {
 public:
  size_t find(const at::Tensor& tensor);
  size_t size() const { return slots_.size(); }

 private:
  struct Buffer {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // no other can have its address meanwhile
    int64_t offset;

    bool operator==(const Buffer& other) const {
      return storage._unsafe_get_target() == other.storage._unsafe_get_target() &&
             offset == other.offset;
    }
  };
  struct Slot {
    Buffer buffer;
    bool came_back;
  };

  size_t add(Buffer buffer, bool came_back);

  std::vector<Slot> slots_;
  std::vector<Buffer> displaced_;  // had a slot before they were seen to come back
  size_t last_ = 0;
};

}  // namespace powersgd
