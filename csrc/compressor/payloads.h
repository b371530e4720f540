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
  int64_t numel = 0;
  int64_t padded_numel = 0;  // as many for each slice of a host, or for each chunk of elements
  std::shared_ptr<const Levels> levels = {};  // null: one level
  // What this rank sends: the elements [begin, end) of the payload, which are all or its slice, to
  // `peers` ranks, of which it is number `own`.
  int64_t begin = 0, end = 0;
  int32_t own = 0, peers = 1;
  Schedule schedule = Schedule::kAllreduce;
  bool in_packets = false;         // else as elements
  kernels::PacketLayout layout{};  // of packets
  int64_t raw_offset = 0;          // in the payload, of the raw segments that this rank sends
  int64_t sent_bytes = 0;          // by this rank to one peer, in all
  int64_t wire_bytes = 0;          // the same for all slices of a host
  int64_t buffer_bytes = 0;        // of all buffers besides the elements

  int64_t slice_numel() const { return levels ? padded_numel / levels->within.count() : numel; }
};

struct PayloadPlans {
  PayloadPlan p, q;
};
PayloadPlans plan_payloads(const BucketSpec& spec);

// Returns how `bytes` bytes travel among `ranks` ranks: one-shot if that sends hardly more than
// two-shot would, because a second exchange takes time, too.
Schedule choose_schedule(int64_t ranks, int64_t bytes);

// True if packets of `bytes` bytes are summed in two levels: unless one level sends hardly more
// from a host, because it takes fewer exchanges.
bool takes_two_levels(const Levels& levels, int64_t bytes);

// Makes a payload. `elements` has plan.padded_numel of them. `packets` is complete except for its
// layout, its buffers, and what the plan has.
std::unique_ptr<Payload> make_payload(const PayloadPlan& plan, const at::Tensor& elements,
                                      const kernels::Packets& packets, const Stages& stages);

}  // namespace powersgd
