// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/core/Device.h>

#include <vector>

#include "powersgd/kernels/kernels.h"
#include "powersgd/kernels/packets.h"

namespace powersgd {

// The kernels of one device type, without state. Every call runs on the calling thread's current
// stream and throws if a launch fails.
class Stages {
 public:
  virtual ~Stages() = default;
  virtual kernels::TileTable make_tiles(const std::vector<kernels::Matrix>& matrices,
                                        const std::vector<kernels::RawSegment>& raw) const = 0;
  virtual void random_start(const kernels::Bucket& bucket) const = 0;
  virtual void project(const kernels::Bucket& bucket) const = 0;
  virtual void orthogonalize(const kernels::Bucket& bucket) const = 0;
  virtual void back_project(const kernels::Bucket& bucket) const = 0;
  virtual void reconstruct(const kernels::Bucket& bucket) const = 0;
  // False if the kernels leave the products of such a bucket to TorchProducts. project and
  // reconstruct then do all else. orthogonalize and back_project are not called.
  virtual bool multiplies(const kernels::Bucket& bucket) const = 0;
  virtual void quantize(const kernels::Packets& packets) const = 0;
  virtual void requantize(const kernels::Packets& packets) const = 0;
  virtual void dequantize(const kernels::Packets& packets) const = 0;
  // True if enqueued work becomes part of a CUDA graph, which may be replayed at any time.
  virtual bool is_capturing() const { return false; }
};

// Adds the stages of a device type that this build has no kernels for. They must outlive their use.
void add_stages(c10::DeviceType device, const Stages& stages);

// Returns the stages of a device type, or null if this build has no kernels for it.
const Stages* find_stages(c10::DeviceType device);

// Throws instead of returning null.
const Stages& require_stages(c10::DeviceType device);

// Returns is_capturing() of the stages of `device`, for its current stream. `device` need not be
// the current one. False if this build has no kernels for it.
bool is_capturing(c10::Device device);

}  // namespace powersgd
