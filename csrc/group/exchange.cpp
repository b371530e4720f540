// SPDX-License-Identifier: BSD-3-Clause
#include "group/exchange.h"

#include <ATen/ATen.h>

namespace powersgd {
namespace {

// Begins a collective of a schedule, if it has that many. Among all ranks if `members` is null.
void begin_of_schedule(Payload& payload, size_t number, Channel& channel, const Members* members) {
  const Schedule schedule = payload.schedule();
  if (number == 0) {
    if (schedule == Schedule::kAllreduce) return channel.allreduce(payload.elements());
    payload.quantize();
    if (schedule == Schedule::kOneShot) {
      channel.allgather(payload.received(), payload.sent(), members);
    } else {
      channel.alltoall(payload.received(), payload.sent(), members);
    }
  } else if (number == 1 && schedule == Schedule::kTwoShot) {
    payload.requantize();
    channel.allgather(payload.gathered(), payload.reduced(), members);
  }
}

}  // namespace

int64_t bytes_on_wire(Payload& payload) {
  const bool whole = payload.schedule() == Schedule::kAllreduce;
  return static_cast<int64_t>(whole ? payload.elements().nbytes() : payload.sent().nbytes());
}

void begin_collective(Payload& payload, size_t number, Channel& channel) {
  HostSum* const host = payload.host();
  if (!host) return begin_of_schedule(payload, number, channel, nullptr);
  const Levels& levels = *host->levels;
  if (number == 0) return channel.alltoall(host->terms, host->slices, &levels.within);
  if (number == 1) host->add();
  if (number < 3) return begin_of_schedule(payload, number - 1, channel, &levels.across);
  payload.dequantize();
  channel.allgather(host->slices, host->slice, &levels.within);
}

void end_sum(Payload& payload) {
  if (payload.schedule() != Schedule::kAllreduce && !payload.host()) payload.dequantize();
}

}  // namespace powersgd
