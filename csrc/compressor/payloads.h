// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "compressor/bucket_spec.h"
#include "compressor/device_stages.h"
#include "powersgd/compressor/payload.h"
#include "powersgd/kernels/packets.h"

namespace powersgd {

// How one payload travels.
struct PayloadPlan {
  int64_t numel;
  Schedule schedule = Schedule::kAllreduce;
  bool in_packets = false;         // else as elements
  kernels::PacketLayout layout{};  // of packets
  int64_t chunk_numel = 0;         // of elements two-shot; the last chunk is padded
  int64_t wire_bytes = 0;          // of all that this rank sends once
  int64_t buffer_bytes = 0;        // of all buffers besides the elements

  // The elements with their padding.
  int64_t padded_numel(int64_t ranks) const {
    return chunk_numel > 0 ? ranks * chunk_numel : numel;
  }
};

struct PayloadPlans {
  PayloadPlan p, q;
};
PayloadPlans plan_payloads(const BucketSpec& spec);

// Returns how `bytes` bytes travel: one-shot if that sends hardly more than two-shot would, because
// a second exchange takes time, too.
Schedule choose_schedule(const Ranks& ranks, int64_t bytes);

// Makes a payload. `elements` has plan.padded_numel() of them. `packets` is complete except for its
// layout and buffers.
std::unique_ptr<Payload> make_payload(const PayloadPlan& plan, const at::Tensor& elements,
                                      const kernels::Packets& packets, const Stages& stages);

}  // namespace powersgd
