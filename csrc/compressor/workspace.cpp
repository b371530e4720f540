// SPDX-License-Identifier: BSD-3-Clause
#include "powersgd/compressor/workspace.h"

#include <ATen/ATen.h>

#include <utility>

namespace powersgd {

void Workspace::reserve(int64_t bytes, at::Device device) {
  if (memory_.defined() && static_cast<int64_t>(memory_.nbytes()) >= bytes) return;
  // Frees the old memory first, so the new memory can take its place.
  if (std::exchange(is_captured_, false)) of_graphs_.push_back(memory_);
  memory_ = at::Tensor();
  memory_ = at::empty({bytes}, at::TensorOptions(device).dtype(at::kByte));
}

Workspaces Workspaces::of_pipeline() {
  return {std::make_shared<Workspace>(), std::make_shared<Workspace>()};
}

Workspaces Workspaces::of_one_bucket() {
  const auto workspace = std::make_shared<Workspace>();
  return {workspace, workspace};
}

}  // namespace powersgd
