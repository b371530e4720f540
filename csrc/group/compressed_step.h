// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <memory>

#include "engine/engine.h"
#include "powersgd/compressor/compressor.h"
#include "powersgd/group/stage_probe.h"
#include "powersgd/group/stats.h"

namespace powersgd {

// Makes an engine's job of one step of one bucket (docs/algorithm.md). If the job fails, the
// gradient was not delivered and the residual is as before. The job adds its bytes and the seconds
// of each stage to `stats`.
Job compressed_step(const std::shared_ptr<BucketCompressor>& compressor, const at::Tensor& gradient,
                    const StepInfo& info, const std::shared_ptr<Stats>& stats,
                    std::shared_ptr<const StageProbe> probe);

}  // namespace powersgd
