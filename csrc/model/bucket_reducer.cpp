// SPDX-License-Identifier: BSD-3-Clause
#include "powersgd/model/bucket_reducer.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "compressor/device_stages.h"
#include "group/buffer_place.h"
#include "group/replicas.h"
#include "model/parameter_layout.h"
#include "powersgd/compressor/dtypes.h"
#include "powersgd/model/outline.h"

namespace powersgd {

struct BucketReducer::Expected {
  size_t bucket;
  BufferPlace place;
  std::vector<size_t> parameters;
  double divided_after;
};

std::shared_ptr<BucketReducer> BucketReducer::make(const std::shared_ptr<Session>& session,
                                                   std::vector<std::string> names,
                                                   const std::vector<at::Tensor>& parameters,
                                                   Options options, const BucketReducer* previous) {
  validate(options);
  NamedParameters named(std::move(names), parameters, options.matrix_ranks);
  auto reducer = std::make_shared<BucketReducer>(
      session,
      std::make_shared<ModelStates>(session, std::move(named), std::move(options),
                                    previous != nullptr ? previous->states_.get() : nullptr));
  if (previous != nullptr) reducer->stats_->add(previous->stats_->snapshot());
  return reducer;
}

void BucketReducer::note_attached() {
  session_->note_attached(starts_at());
  session_->add_taker(weak_from_this());
}

BucketReducer::BucketReducer(std::shared_ptr<Session> session, std::shared_ptr<ModelStates> states)
    : session_(std::move(session)),
      states_(std::move(states)),
      options_(states_->options()),
      stats_(std::make_shared<Stats>(session_->stats())),
      step_counter_(stats_->make_step_counter()) {}

c10::intrusive_ptr<c10d::Work> BucketReducer::reduce(size_t bucket, at::Tensor& buffer,
                                                     const std::vector<size_t>& parameters,
                                                     int divisor, bool more_follow,
                                                     std::vector<Use> uses) {
  const auto [compressor, step] =
      begin(bucket, buffer, parameters, std::move(uses), 1.0 / divisor, 1);
  return compressor ? session_->allreduce_compressed(compressor, buffer, step, stats_,
                                                     c10d::kUnsetTimeout, more_follow)
                    : session_->average_exact(buffer, divisor, *stats_);
}

void BucketReducer::expect(size_t bucket, const at::Tensor& buffer, std::vector<size_t> parameters,
                           double divided_after) {
  expected_ = std::make_shared<const Expected>(
      Expected{bucket, BufferPlace(buffer), std::move(parameters), divided_after});
}

bool BucketReducer::expects(const at::Tensor& buffer) const {
  return expected_ && expected_->place.is_of(buffer);
}

c10::intrusive_ptr<c10d::Work> BucketReducer::reduce_expected(const at::Tensor& buffer,
                                                              const c10d::AllreduceOptions& opts) {
  const std::shared_ptr<const Expected> expected = std::exchange(expected_, nullptr);
  const bool average = opts.reduceOp == c10d::ReduceOp::AVG;
  if (!average && opts.reduceOp != c10d::ReduceOp::SUM) return nullptr;
  const int ranks = session_->size();
  const double output_scale = average ? 1.0 / ranks : 1.0;
  const double units = expected->divided_after / (ranks * output_scale);
  at::Tensor gradient = buffer;
  const auto [compressor, step] =
      begin(expected->bucket, gradient, expected->parameters, /*uses=*/{}, output_scale, units);
  if (compressor) {
    return session_->allreduce_compressed(compressor, gradient, step, stats_, opts.timeout);
  }
  session_->count_exact(static_cast<int64_t>(buffer.nbytes()), *stats_);
  return nullptr;
}

BucketReducer::Reduction BucketReducer::begin(size_t bucket, at::Tensor& buffer,
                                              const std::vector<size_t>& parameters,
                                              std::vector<Use> uses, double output_scale,
                                              double units) {
  session_->check_not_coalescing();
  states_->begin_step();
  if (parameters.empty()) warn_of_unknown_parameters();
  const bool known = !parameters.empty() && !buffer.is_sparse();
  auto compressor = known ? find_compressor(bucket, buffer, parameters) : nullptr;
  const bool captured = is_capturing(buffer.device());
  if (compressor && captured) {
    captured_.insert(compressor);
    states_->note_captured();
  }
  StepInfo step;
  step.output_scale = output_scale;
  step.units = units;
  step.step = static_cast<uint64_t>(states_->step());
  step.bucket = static_cast<int64_t>(bucket);
  step.uses = std::move(uses);
  // The host may wait only where it reads the scale itself.
  const at::Tensor& scale = states_->loss_scale();
  step.loss_scale = scale.to(scale.options().device(buffer.device()), !buffer.is_cpu());
  if (compressor) clear_stale_non_finite(buffer, parameters, step.uses);
  // Each replay would add them again.
  if (known && !captured) states_->add_unsent_residuals(buffer, parameters, step);
  return {std::move(compressor), std::move(step)};
}

void BucketReducer::warn_of_unknown_parameters() {
  if (session_->rank() != 0 || std::exchange(warned_of_unknown_, true)) return;
  session_->log(LogLevel::kWarning,
                "a unit of FSDP2 is averaged exactly, because some of its parameters are unused "
                "and FSDP2 does not say which, or because they were frozen in attach. Call "
                "set_reduce_scatter_unused_params(True) to compress unused parameters as well, "
                "and detach and attach again after you unfreeze parameters");
}

// A compressor is made in the first pass that has its layout, even if that pass is still exact.
std::shared_ptr<BucketCompressor> BucketReducer::find_compressor(
    size_t bucket, const at::Tensor& buffer, const std::vector<size_t>& parameters) {
  if (!active_ || !session_->admits_attached(options_)) return nullptr;
  Bucket& made = buckets_[bucket];
  if (!made.holds(buffer, parameters)) {
    made = {};  // frees its memory for the new one
    made = make_bucket(buffer, parameters);
  }
  if (!warm()) return nullptr;
  if (states_->compresses() && !std::exchange(announced_, true)) announce_start();
  return made.compressor;
}

BucketReducer::Bucket BucketReducer::make_bucket(const at::Tensor& buffer,
                                                 const std::vector<size_t>& parameters) {
  std::vector<ParameterShape> shapes;
  int64_t numel = 0;
  for (const size_t index : parameters) {
    shapes.push_back(states_->parameters().shape(index));
    numel += shapes.back().numel();
  }
  TORCH_CHECK(numel == buffer.numel(), "powersgd: a bucket has ", buffer.numel(),
              " elements, but its parameters have ", numel,
              "; this version of torch lays out its buckets in an unknown way");
  Bucket made;
  BucketPlan plan = plan_bucket(shapes, options_);
  // FSDP2 reduces in another dtype if its module is converted before its first pass.
  if (plan.compresses() && is_compressible(buffer.scalar_type())) {
    std::vector<ParameterStatePtr> states;
    for (const PlannedMatrix& matrix : plan.matrices) {
      states.push_back(states_->of(parameters[static_cast<size_t>(matrix.parameter)]));
    }
    made.compressor = make_compressor(
        std::move(plan), std::move(states), options_, buffer.scalar_type(), buffer.device(),
        session_->ranks_on(buffer.device()), step_counter_, workspaces_on(buffer.device()));
    session_->run_after_steps(buffer.device(), [&made] { made.compressor->prepare(); });
  }
  made.parameters = parameters;
  made.dtype = buffer.scalar_type();
  made.device = buffer.device();
  return made;
}

const Workspaces& BucketReducer::workspaces_on(c10::Device device) {
  const auto found = workspaces_.find(device);
  if (found != workspaces_.end()) return found->second;
  return workspaces_.emplace(device, Workspaces::of_pipeline()).first->second;
}

// DDP drops the old gradient unless another rank has used the parameter. That rank's gradient is
// non-finite too if it contains the same old one.
void BucketReducer::clear_stale_non_finite(const at::Tensor& buffer,
                                           const std::vector<size_t>& parameters,
                                           const std::vector<Use>& uses) const {
  if (uses.empty()) return;
  const std::vector<at::Tensor> gradients = states_->parameters().split(buffer, parameters);
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (uses[i] == Use::kStale) gradients[i].nan_to_num_(0, 0, 0);
  }
}

void BucketReducer::announce_start() const {
  const Outline all = outline_of(states_->parameters(), options_);
  session_->log(LogLevel::kInfo,
                c10::str("compression starts at step ", states_->step(), ": matrix rank ",
                         options_.matrix_approximation_rank, ", ", all.compressed_parameters,
                         " of ", all.parameters, " parameters as low-rank factors, ", all.numel,
                         " elements per step sent as ", all.sent_numel, ", error feedback ",
                         options_.use_error_feedback ? "on" : "off", ", warm start ",
                         options_.warm_start ? "on" : "off"));
}

void BucketReducer::end_step() {
  states_->count_step();
  session_->flush();
  const std::vector<c10::Device> devices = states_->parameters().devices();
  const bool captured = std::any_of(devices.begin(), devices.end(), is_capturing);
  session_->end_step(*stats_, options_, captured);
  if (captured) return;  // what follows reads from the device
  try {
    watch(devices);
  } catch (const c10::DistBackendError&) {  // the group has ended, as the sums of the step say
  }
}

void BucketReducer::watch(const std::vector<c10::Device>& devices) {
  states_->watch_captured(/*compressed=*/warm());
  if (options_.check_every == 0 || states_->step() % options_.check_every != 0) return;
  for (const c10::Device device : devices) {
    session_->check_replicas(states_->replicas(device), device, stats_);
  }
}

void BucketReducer::abandon_step() {
  end_step();
  states_->step_skipped();
}

void BucketReducer::detach() {
  active_ = false;
  if (detached_.exchange(true)) return;
  states_->release();
  if (!captured_.empty()) return;
  buckets_.clear();
  workspaces_.clear();
}

bool BucketReducer::compressing() const {
  return warm() && states_->compresses() && session_->admits_attached(options_);
}

std::optional<int64_t> BucketReducer::starts_at() const {
  const bool never = detached_ || session_->size() == 1 || !states_->compresses();
  return never ? std::nullopt : std::optional(options_.start_powerSGD_iter);
}

std::string BucketReducer::not_started(int64_t soon) {
  if (said_not_started_) return "";
  std::string message = session_->not_started(*stats_, starts_at(), soon);
  return message.empty() || said_not_started_.exchange(true) ? "" : message;
}

}  // namespace powersgd
