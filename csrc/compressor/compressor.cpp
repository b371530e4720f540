// SPDX-License-Identifier: BSD-3-Clause
#include "powersgd/compressor.h"

#include <utility>

#include "compressor/alternating_compressor.h"
#include "compressor/bucket_spec.h"
#include "compressor/plain_compressor.h"
#include "compressor/stages.h"

namespace powersgd {

bool has_kernels(c10::DeviceType device) { return find_stages(device) != nullptr; }

std::unique_ptr<BucketCompressor> make_compressor(BucketPlan plan,
                                                  std::vector<ParameterStatePtr> states,
                                                  const Options& options,
                                                  at::ScalarType gradient_type, at::Device device,
                                                  std::shared_ptr<StepCounter> step_counter) {
  TORCH_INTERNAL_ASSERT(states.size() == plan.matrices.size());
  to_dtype(gradient_type);  // throws for a dtype that is not compressed
  BucketSpec spec{std::move(plan), options, gradient_type, device};
  if (options.alternating) {
    return std::make_unique<AlternatingCompressor>(std::move(spec), std::move(states),
                                                   std::move(step_counter));
  }
  return std::make_unique<PlainCompressor>(std::move(spec), std::move(states),
                                           std::move(step_counter));
}

}  // namespace powersgd
