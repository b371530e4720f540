// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "compressor/bucket_spec.h"
#include "compressor/device_stages.h"
#include "powersgd/packets.h"
#include "powersgd/payload.h"

namespace powersgd {

// How one payload travels.
struct PayloadPlan {
  int64_t numel;
  Schedule schedule = Schedule::kAllreduce;
  kernels::PacketLayout layout{};  // of packets
  int64_t buffer_bytes = 0;        // of all packets

  // The payload's bytes on the wire.
  int64_t wire_bytes(int64_t factor_width) const {
    return schedule == Schedule::kAllreduce ? numel * factor_width : layout.bytes();
  }
};

struct PayloadPlans {
  PayloadPlan p, q;
};
PayloadPlans plan_payloads(const BucketSpec& spec);

// Returns how packets of `bytes` bytes travel: one-shot if that sends hardly more than two-shot
// would, because a second collective takes its time as well.
Schedule choose_schedule(const Ranks& ranks, int64_t bytes);

// A payload of one bucket, with the buffers of its packets.
class BucketPayload final : public Payload {
 public:
  // `packets` is complete except for its layout and buffers.
  BucketPayload(const PayloadPlan& plan, at::Tensor elements, const kernels::Packets& packets,
                const Stages& stages);

  Schedule schedule() const override { return plan_.schedule; }
  at::Tensor& elements() override { return elements_; }
  at::Tensor sent() override { return buffer(0, plan_.layout.bytes()); }
  at::Tensor received() override;
  at::Tensor reduced() override;
  at::Tensor gathered() override;
  void quantize() override { stages_.quantize(packets_); }
  void requantize() override { stages_.requantize(packets_); }
  void dequantize() override;

 private:
  at::Tensor buffer(int64_t offset, int64_t bytes) const {
    return buffers_.narrow(0, offset, bytes);
  }

  const PayloadPlan plan_;
  at::Tensor elements_;
  const at::Tensor buffers_;  // sent, received, and two-shot gathered and reduced
  kernels::Packets packets_;
  const Stages& stages_;
};

}  // namespace powersgd
