// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>

#include "engine/engine.h"
#include "powersgd/payload.h"

namespace powersgd {

// Returns the bytes of this rank's elements or packets.
int64_t bytes_on_wire(Payload& payload);

// Sums a payload over the ranks by its schedule.
void sum_over_ranks(Payload& payload, Channel& channel);

}  // namespace powersgd
