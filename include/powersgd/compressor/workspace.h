// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace powersgd {

// Purpose: the kernels' workspace on one device, which buckets use one after the other. Nothing in
// it outlives the part of a step that wrote it.
//
// Threads: reserve() runs while no step of these buckets is in flight, in the order of the engine's
// jobs. Its stream follows all earlier steps.
class Workspace {
 public:
  // Grows the workspace to at least `bytes`. Kernels already enqueued on this stream may still use
  // the memory that it releases.
  void reserve(int64_t bytes, at::Device device);

  // Notes that a CUDA graph holds the current memory, which then stays.
  void captured() { is_captured_ = true; }

  void* data() const { return memory_.data_ptr(); }
  // Its bytes, at least as many as were reserved.
  const at::Tensor& memory() const { return memory_; }

 private:
  at::Tensor memory_;
  bool is_captured_ = false;
  std::vector<at::Tensor> of_graphs_;  // each larger than the one before
};

// The workspaces of a step. A stream engine runs one bucket's projection alongside another's later
// stages, but never two of a kind at once.
struct Workspaces {
  std::shared_ptr<Workspace> first;   // of project
  std::shared_ptr<Workspace> second;  // of all that follows

  // For the buckets of a model.
  static Workspaces of_pipeline();
  // For a single bucket, whose stages do not overlap.
  static Workspaces of_one_bucket();
};

}  // namespace powersgd
