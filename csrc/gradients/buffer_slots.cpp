// SPDX-License-Identifier: BSD-3-Clause
#include "gradients/buffer_slots.h"

#include <algorithm>
#include <utility>

namespace powersgd {
namespace {

// So many models may begin one after the other before the first of them comes back.
constexpr size_t kKeepDisplaced = 16;

}  // namespace

size_t BufferSlots::find(const at::Tensor& tensor) {
  Buffer buffer{tensor.storage().getWeakStorageImpl(), tensor.storage_offset()};
  const auto known = std::find_if(slots_.begin(), slots_.end(),
                                  [&](const Slot& slot) { return slot.buffer == buffer; });
  if (known != slots_.end()) {
    known->came_back = true;
    last_ = static_cast<size_t>(known - slots_.begin());
    return last_;
  }
  const auto displaced = std::find(displaced_.begin(), displaced_.end(), buffer);
  if (displaced != displaced_.end()) {
    displaced_.erase(displaced);
    return add(std::move(buffer), /*came_back=*/true);
  }
  const auto gone = std::find_if(slots_.begin(), slots_.end(),
                                 [](const Slot& slot) { return slot.buffer.storage.expired(); });
  if (gone != slots_.end()) {
    last_ = static_cast<size_t>(gone - slots_.begin());
  } else if (slots_.empty() || slots_[last_].came_back) {
    return add(std::move(buffer), /*came_back=*/false);
  } else {
    displaced_.push_back(std::move(slots_[last_].buffer));
    if (displaced_.size() > kKeepDisplaced) displaced_.erase(displaced_.begin());
  }
  slots_[last_] = {std::move(buffer), false};
  return last_;
}

size_t BufferSlots::add(Buffer buffer, bool came_back) {
  slots_.push_back({std::move(buffer), came_back});
  last_ = slots_.size() - 1;
  return last_;
}

}  // namespace powersgd
