// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "engine/engine.h"
#include "powersgd/payload.h"

namespace powersgd {

// Sums a payload over the ranks by its schedule.
void sum_over_ranks(Payload& payload, Channel& channel);

}  // namespace powersgd
