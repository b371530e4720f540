// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>

#include "powersgd/compressor/payload.h"
#include "powersgd/core/options.h"
#include "powersgd/core/plan.h"

namespace powersgd {

// One host's part in one of the two reductions of a step.
struct Traffic {
  Schedule schedule = Schedule::kAllreduce;
  bool two_levels = false;
  int64_t payload_bytes = 0;  // of the payload's elements, or of its packets
  int64_t sent_bytes = 0;     // what leaves the host of a rank, if an all-reduce is a ring
};

// "all-reduce", "one-shot" or "two-shot".
std::string to_string(Schedule schedule);

struct StepTraffic {
  Traffic p, q;
};

// Returns the traffic of a compressed step of a bucket.
StepTraffic traffic_of(const BucketPlan& plan, const Options& options, at::ScalarType gradient_type,
                       const Ranks& ranks);

// Returns the bytes of a bucket's payloads on the wire, without counts and padding. For a bucket of
// one parameter, these are the parameter's share.
int64_t content_bytes(const BucketPlan& plan, const Options& options, at::ScalarType gradient_type);

}  // namespace powersgd
