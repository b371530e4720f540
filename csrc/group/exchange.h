// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/engine.h"
#include "powersgd/compressor/payload.h"

namespace powersgd {

// Returns the bytes of this rank's elements or packets.
int64_t bytes_on_wire(Payload& payload);

// The number of collectives that the sum of a payload may need.
constexpr size_t kCollectivesOfOneLevel = 2, kCollectivesOfTwoLevels = 4;

// These sum a payload over the ranks. Each call goes into its own part of a job, because the next
// one needs the collective that it may begin.
void begin_collective(Payload& payload, size_t number, Channel& channel);
void end_sum(Payload& payload);

}  // namespace powersgd
