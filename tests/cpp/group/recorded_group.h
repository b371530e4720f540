// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "powersgd/group/forwarding_backend.h"
#include "support/recording_backend.h"

namespace powersgd::test {

constexpr c10::DeviceType kCpu = c10::DeviceType::CPU;
constexpr c10::DeviceType kAccelerator = c10::DeviceType::Meta;  // stands for one

using Recorder = c10::intrusive_ptr<RecordingBackend>;
using Methods = std::vector<std::string>;

// A rank of a group over two inner backends that record their calls. The CPU's comes first, so that
// it is primary until a device is bound.
class RecordedGroup : public ::testing::Test {
 protected:
  explicit RecordedGroup(int rank = 0, int size = 2)
      : cpu_(c10::make_intrusive<RecordingBackend>(rank, size, "slow")),
        accel_(c10::make_intrusive<RecordingBackend>(rank, size, "fast")),
        backend_(c10::make_intrusive<ForwardingBackend>(
            rank, size, Inners{{kCpu, cpu_}, {kAccelerator, accel_}})) {}

  const Recorder cpu_, accel_;
  const c10::intrusive_ptr<ForwardingBackend> backend_;
};

}  // namespace powersgd::test
