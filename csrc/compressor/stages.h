// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/core/Device.h>

#include <vector>

#include "powersgd/kernels.h"

namespace powersgd {

// The kernels of one device type. Stateless. Every call runs on the calling thread's current stream
// and throws if a launch fails.
class Stages {
 public:
  virtual ~Stages() = default;
  virtual kernels::TileTable make_tiles(const std::vector<kernels::Matrix>& matrices,
                                        const std::vector<kernels::RawSegment>& raw,
                                        DType factor_dtype) const = 0;
  virtual void random_start(const kernels::Bucket& bucket) const = 0;
  virtual void project(const kernels::Bucket& bucket) const = 0;
  virtual void orthogonalize(const kernels::Bucket& bucket) const = 0;
  virtual void back_project(const kernels::Bucket& bucket) const = 0;
  virtual void project_transposed(const kernels::Bucket& bucket) const = 0;
  virtual void reconstruct(const kernels::Bucket& bucket) const = 0;
};

// Makes `stages`, which must outlive its use, those of a device type that this build has none for.
void add_stages(c10::DeviceType device, const Stages& stages);

// Null where this build has no kernels for the device type.
const Stages* find_stages(c10::DeviceType device);

// Throws there.
const Stages& require_stages(c10::DeviceType device);

}  // namespace powersgd
