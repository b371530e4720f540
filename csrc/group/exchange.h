// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>

#include "engine/engine.h"
#include "powersgd/compressor/payload.h"

namespace powersgd {

// Returns the bytes of this rank's elements or packets.
int64_t bytes_on_wire(Payload& payload);

// These sum a payload over the ranks by its schedule. Each goes into its own part of a job, because
// the next one needs the collective that it may begin.
void begin_sum(Payload& payload, Channel& channel);
void continue_sum(Payload& payload, Channel& channel);
void end_sum(Payload& payload);

}  // namespace powersgd
