// SPDX-License-Identifier: BSD-3-Clause
#include "gradients/compressed_step.h"

#include <utility>

#include "gradients/exchange.h"
#include "gradients/span.h"

namespace powersgd {
namespace {

// Times a stage, and lets the probe and a profiler see it.
class Observed {
 public:
  Observed(std::shared_ptr<Stats> stats, std::shared_ptr<const StageProbe> probe,
           SpanArguments arguments)
      : stats_(std::move(stats)), probe_(std::move(probe)), arguments_(arguments) {}

  template <typename Body>
  decltype(auto) operator()(Stage stage, Body&& body) const {
    return (*this)(stage, [this] { return arguments_; }, std::forward<Body>(body));
  }

  template <typename Arguments, typename Body>
  decltype(auto) operator()(Stage stage, const Arguments& arguments, Body&& body) const {
    if (probe_ && *probe_) (*probe_)(to_string(stage));
    const StageTimer timer(*stats_, stage);
    const Span span(stage, arguments);
    return std::forward<Body>(body)();
  }

  void reduce(Stage stage, Payload& payload, Channel& channel) const {
    const auto arguments = [&] {
      SpanArguments of_payload = arguments_;
      of_payload.bytes = bytes_on_wire(payload);
      return of_payload;
    };
    (*this)(stage, arguments, [&] { sum_over_ranks(payload, channel); });
  }

 private:
  std::shared_ptr<Stats> stats_;
  std::shared_ptr<const StageProbe> probe_;
  SpanArguments arguments_;
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
  const Observed run(stats, std::move(probe),
                     {step.bucket, compressor->gradient_bytes(), compressor->approximation_rank()});
  Job job;
  job.first = or_rollback([compressor, gradient, step, run, stats](Channel& channel) {
    Payload& p =
        run(Stage::kProject, [&]() -> Payload& { return compressor->project(gradient, step); });
    stats->add_compressed(compressor->gradient_bytes(), compressor->payload_bytes());
    run.reduce(Stage::kReduceP, p, channel);
  });
  job.second = or_rollback([compressor, run](Channel& channel) {
    run(Stage::kOrthogonalize, [&] { compressor->orthogonalize(); });
    Payload& q = run(Stage::kBackProject, [&]() -> Payload& { return compressor->back_project(); });
    run.reduce(Stage::kReduceQ, q, channel);
    run(Stage::kReconstruct, [&] { compressor->reconstruct(); });
  });
  for (const ParameterStatePtr& state : compressor->states()) job.changes.push_back(state.get());
  return job;
}

}  // namespace powersgd
