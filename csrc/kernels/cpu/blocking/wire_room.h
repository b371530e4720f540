// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/shared/layout.h"
#include "kernels/shared/wire.h"
#include "powersgd/kernels.h"

// Where a wire rounds, the stages compute on payloads in the factor dtype, which have this room at
// the front of the workspace:
//
//   [ P or Q | raw segments | counts ]
//
// No stage needs both P and Q.
namespace powersgd::kernels::cpu {

struct WireRoom {
  int64_t factor_numel;  // of P or of Q, whichever has more elements
  int64_t rest_numel;    // of the raw segments and the counts

  static WireRoom of(const Bucket& bucket) {
    return {std::max(bucket.raw_offset, bucket.q_numel), bucket.p_numel - bucket.raw_offset};
  }

  // Whole cache lines, so that the rest of the workspace keeps its alignment.
  int64_t bytes(DType factor_dtype) const {
    return round_up((factor_numel + rest_numel) * size_of(factor_dtype), kSlotBytes);
  }
};

// Returns the bucket with payloads of the factor dtype, in the workspace, if the wire rounds.
inline Bucket in_factor_dtype(const Bucket& bucket) {
  Bucket result = bucket;
  if (!wire_rounds(bucket)) return result;
  const WireRoom room = WireRoom::of(bucket);
  auto* start = static_cast<unsigned char*>(bucket.workspace);
  result.q_payload = start;
  result.p_payload = start + (room.factor_numel - bucket.raw_offset) * size_of(bucket.factor_dtype);
  result.workspace = start + room.bytes(bucket.factor_dtype);
  result.wire_dtype = bucket.factor_dtype;
  return result;
}

}  // namespace powersgd::kernels::cpu
