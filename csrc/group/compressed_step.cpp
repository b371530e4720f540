// SPDX-License-Identifier: BSD-3-Clause
#include "group/compressed_step.h"

#include <functional>
#include <memory>
#include <utility>

#include "group/exchange.h"
#include "group/span.h"

namespace powersgd {
namespace {

// One step on its way through the parts of a job.
class Step {
 public:
  Step(std::shared_ptr<BucketCompressor> compressor, at::Tensor gradient, const StepInfo& info,
       std::shared_ptr<Stats> stats, std::shared_ptr<const StageProbe> probe)
      : compressor_(std::move(compressor)),
        gradient_(std::move(gradient)),
        info_(info),
        stats_(std::move(stats)),
        probe_(std::move(probe)) {
    tell_probe("ready");
  }

  void begin(Channel& channel) {
    run(Stage::kProject, [&] { payload_ = &compressor_->project(gradient_, info_); });
    stats_->add_compressed(compressor_->gradient_bytes(), compressor_->payload_bytes());
    begin_reduction(Stage::kReduceP, channel);
  }

  void go_on(size_t collective, Channel& channel) {
    const StageTimer timer(*stats_, reduction_);
    begin_collective(*payload_, collective, channel);
  }

  void middle(Channel& channel) {
    end_reduction();
    run(Stage::kOrthogonalize, [&] { compressor_->orthogonalize(); });
    run(Stage::kBackProject, [&] { payload_ = &compressor_->back_project(); });
    begin_reduction(Stage::kReduceQ, channel);
  }

  void end() {
    end_reduction();
    run(Stage::kReconstruct, [&] { compressor_->reconstruct(); });
    tell_probe("end");
  }

  // Watches a collective of the reduction.
  std::shared_ptr<void> observe() const {
    struct Collective {
      explicit Collective(const Step& step)
          : step(step), observed(*step.stats_, step.reduction_, [&step] {
              return step.arguments(bytes_on_wire(*step.payload_));
            }) {
        step.tell_probe("collective");
      }
      ~Collective() { step.tell_probe("collective_end"); }
      const Step& step;
      const Observed observed;
    };
    return std::make_shared<Collective>(*this);
  }

 private:
  // Times a stage, and shows it to a profiler.
  struct Observed {
    template <typename Arguments>
    Observed(Stats& stats, Stage stage, const Arguments& arguments)
        : timer(stats, stage), span(stage, arguments) {}
    StageTimer timer;
    Span span;
  };

  void tell_probe(const char* reached) const {
    if (probe_ && *probe_) (*probe_)(reached, info_.bucket);
  }

  SpanArguments arguments(int64_t bytes) const {
    return {info_.bucket, bytes, compressor_->approximation_rank()};
  }

  template <typename Body>
  void run(Stage stage, const Body& body) {
    tell_probe(to_string(stage));
    const Observed observed(*stats_, stage,
                            [this] { return arguments(compressor_->gradient_bytes()); });
    body();
  }

  void begin_reduction(Stage stage, Channel& channel) {
    tell_probe(to_string(stage));
    reduction_ = stage;
    const StageTimer timer(*stats_, stage);
    begin_collective(*payload_, 0, channel);
  }

  void end_reduction() {
    tell_probe("received");
    const StageTimer timer(*stats_, reduction_);
    end_sum(*payload_);
  }

  const std::shared_ptr<BucketCompressor> compressor_;
  const at::Tensor gradient_;
  const StepInfo info_;
  const std::shared_ptr<Stats> stats_;
  const std::shared_ptr<const StageProbe> probe_;
  Payload* payload_ = nullptr;         // the payload being reduced
  Stage reduction_ = Stage::kReduceP;  // its reduction
};

}  // namespace

Job compressed_step(const std::shared_ptr<BucketCompressor>& compressor, const at::Tensor& gradient,
                    const StepInfo& info, const std::shared_ptr<Stats>& stats,
                    std::shared_ptr<const StageProbe> probe) {
  const auto step = std::make_shared<Step>(compressor, gradient, info, stats, std::move(probe));
  Job job;
  const size_t collectives =
      compressor->in_two_levels() ? kCollectivesOfTwoLevels : kCollectivesOfOneLevel;
  const auto sum_up = [&](const std::function<void(Channel&)>& begin) {
    job.parts.push_back(begin);
    for (size_t i = 1; i < collectives; ++i) {
      job.parts.push_back([step, i](Channel& channel) { step->go_on(i, channel); });
    }
  };
  sum_up([step](Channel& channel) { step->begin(channel); });
  job.parts_ahead = job.parts.size();
  sum_up([step](Channel& channel) { step->middle(channel); });
  job.parts.push_back([step](Channel&) { step->end(); });
  job.observe = [step] { return step->observe(); };
  job.undo = [compressor] { compressor->rollback(); };
  for (const ParameterStatePtr& state : compressor->states()) job.changes.push_back(state.get());
  job.exchange = compressor;
  return job;
}

}  // namespace powersgd
