// SPDX-License-Identifier: BSD-3-Clause
#include "powersgd/compressor/traffic.h"

#include "compressor/bucket_spec.h"
#include "compressor/bucket_tables.h"
#include "compressor/payloads.h"
#include "powersgd/kernels/packets.h"

namespace powersgd {
namespace {

Traffic traffic_of_payload(const PayloadPlan& plan, const Ranks& ranks) {
  Traffic traffic{plan.schedule, plan.levels != nullptr, plan.wire_bytes};
  const int64_t peers = plan.schedule == Schedule::kAllreduce ? ranks.count : plan.peers;
  int64_t others = peers - 1, senders = 1;
  if (ranks.levels && !plan.levels && plan.schedule != Schedule::kAllreduce) {
    senders = ranks.levels->within.count();
    others -= senders - 1;
  }
  const int64_t bytes = senders * others * plan.wire_bytes;
  traffic.sent_bytes = plan.schedule == Schedule::kOneShot ? bytes : 2 * bytes / peers;
  return traffic;
}

}  // namespace

std::string to_string(Schedule schedule) {
  switch (schedule) {
    case Schedule::kAllreduce:
      return "all-reduce";
    case Schedule::kOneShot:
      return "one-shot";
    case Schedule::kTwoShot:
      return "two-shot";
  }
  return "unknown";
}

StepTraffic traffic_of(const BucketPlan& plan, const Options& options, at::ScalarType gradient_type,
                       const Ranks& ranks) {
  const PayloadPlans plans = plan_payloads({plan, options, gradient_type, at::kCPU, ranks});
  return {traffic_of_payload(plans.p, ranks), traffic_of_payload(plans.q, ranks)};
}

int64_t content_bytes(const BucketPlan& plan, const Options& options,
                      at::ScalarType gradient_type) {
  if (!is_compressible(gradient_type)) {
    return plan.gradient_numel * static_cast<int64_t>(c10::elementSize(gradient_type));
  }
  const BucketSpec spec{plan, options, gradient_type, at::kCPU, {}};
  if (!options.wire_dtype) {
    return (plan.counts_offset() + plan.q_numel) * size_of(DType::kFloat32);
  }
  const std::vector<kernels::Matrix> matrices = matrices_without_states(plan);
  const int64_t groups =
      kernels::p_packet_factors(matrices).groups + kernels::q_packet_factors(matrices).groups;
  const DType raw_dtype = kernels::raw_dtype_of(to_dtype(gradient_type));
  return groups * kernels::group_bytes(*options.wire_dtype) + plan.raw_numel() * size_of(raw_dtype);
}

}  // namespace powersgd
