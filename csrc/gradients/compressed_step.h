// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <memory>

#include "engine/engine.h"
#include "powersgd/compressor.h"
#include "powersgd/session.h"
#include "powersgd/stats.h"

namespace powersgd {

// One step of one bucket (docs/algorithm.md) as an engine's job. If it fails, the residual is what
// it was before: the gradient was not delivered. Adds the bytes and each stage's seconds to
// `stats`.
Job compressed_step(const std::shared_ptr<BucketCompressor>& compressor, const at::Tensor& gradient,
                    const StepInfo& step, const std::shared_ptr<Stats>& stats,
                    std::shared_ptr<const StageProbe> probe);

}  // namespace powersgd
