// SPDX-License-Identifier: BSD-3-Clause
#include "gradients/compressed_step.h"

#include <utility>

#include "gradients/exchange.h"

namespace powersgd {
namespace {

// Times a stage, and lets the probe see it.
class Timed {
 public:
  Timed(std::shared_ptr<Stats> stats, std::shared_ptr<const StageProbe> probe)
      : stats_(std::move(stats)), probe_(std::move(probe)) {}

  template <typename Body>
  decltype(auto) operator()(Stage stage, Body&& body) const {
    if (probe_ && *probe_) (*probe_)(to_string(stage));
    const StageTimer timer(*stats_, stage);
    return std::forward<Body>(body)();
  }

 private:
  std::shared_ptr<Stats> stats_;
  std::shared_ptr<const StageProbe> probe_;
};

}  // namespace

Job compressed_step(const std::shared_ptr<BucketCompressor>& compressor, const at::Tensor& gradient,
                    const StepInfo& step, const std::shared_ptr<Stats>& stats,
                    std::shared_ptr<const StageProbe> probe) {
  const auto or_rollback = [compressor](auto part) {
    return [compressor, part = std::move(part)](Channel& channel) {
      try {
        part(channel);
      } catch (...) {
        compressor->rollback();
        throw;
      }
    };
  };
  const Timed run(stats, std::move(probe));
  Job job;
  job.first = or_rollback([compressor, gradient, step, run, stats](Channel& channel) {
    Payload& p =
        run(Stage::kProject, [&]() -> Payload& { return compressor->project(gradient, step); });
    stats->add_compressed(compressor->gradient_bytes(), compressor->payload_bytes());
    run(Stage::kReduceP, [&] { sum_over_ranks(p, channel); });
  });
  job.second = or_rollback([compressor, run](Channel& channel) {
    run(Stage::kOrthogonalize, [&] { compressor->orthogonalize(); });
    Payload& q = run(Stage::kBackProject, [&]() -> Payload& { return compressor->back_project(); });
    run(Stage::kReduceQ, [&] { sum_over_ranks(q, channel); });
    run(Stage::kReconstruct, [&] { compressor->reconstruct(); });
  });
  for (const ParameterStatePtr& state : compressor->states()) job.changes.push_back(state.get());
  return job;
}

}  // namespace powersgd
