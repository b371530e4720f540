// SPDX-License-Identifier: BSD-3-Clause
#include "gradients/exchange.h"

#include <ATen/ATen.h>

namespace powersgd {

void sum_over_ranks(Payload& payload, Channel& channel) {
  if (payload.schedule() == Schedule::kAllreduce) return channel.allreduce(payload.elements());
  payload.quantize();
  at::Tensor sent = payload.sent(), received = payload.received();
  if (payload.schedule() == Schedule::kGather) {
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
