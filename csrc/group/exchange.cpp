// SPDX-License-Identifier: BSD-3-Clause
#include "group/exchange.h"

#include <ATen/ATen.h>

namespace powersgd {

int64_t bytes_on_wire(Payload& payload) {
  const bool whole = payload.schedule() == Schedule::kAllreduce;
  return static_cast<int64_t>(whole ? payload.elements().nbytes() : payload.sent().nbytes());
}

void begin_sum(Payload& payload, Channel& channel) {
  if (payload.schedule() == Schedule::kAllreduce) return channel.allreduce(payload.elements());
  payload.quantize();
  if (payload.schedule() == Schedule::kOneShot) {
    channel.allgather(payload.received(), payload.sent());
  } else {
    channel.alltoall(payload.received(), payload.sent());
  }
}

void continue_sum(Payload& payload, Channel& channel) {
  if (payload.schedule() != Schedule::kTwoShot) return;
  payload.requantize();
  channel.allgather(payload.gathered(), payload.reduced());
}

void end_sum(Payload& payload) {
  if (payload.schedule() != Schedule::kAllreduce) payload.dequantize();
}

}  // namespace powersgd
