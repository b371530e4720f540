// SPDX-License-Identifier: BSD-3-Clause
#include "gradients/exchange.h"

#include <ATen/ATen.h>

namespace powersgd {

int64_t bytes_on_wire(Payload& payload) {
  const bool whole = payload.schedule() == Schedule::kAllreduce;
  return static_cast<int64_t>(whole ? payload.elements().nbytes() : payload.sent().nbytes());
}

void sum_over_ranks(Payload& payload, Channel& channel) {
  if (payload.schedule() == Schedule::kAllreduce) return channel.allreduce(payload.elements());
  payload.quantize();
  at::Tensor sent = payload.sent(), received = payload.received();
  if (payload.schedule() == Schedule::kOneShot) {
    channel.allgather(received, sent);
  } else {
    channel.alltoall(received, sent);
    payload.requantize();
    at::Tensor reduced = payload.reduced();
    channel.allgather(sent, reduced);
  }
  payload.dequantize();
}

}  // namespace powersgd
