// SPDX-License-Identifier: BSD-3-Clause
#include "powersgd/attached_model.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "compressor/stages.h"
#include "gradients/capture_watch.h"
#include "gradients/parameter_layout.h"
#include "gradients/replicas.h"
#include "powersgd/stats.h"
#include "powersgd/traffic.h"

namespace powersgd {
namespace {

// Returns views of the parts of a bucket, one for each of the parameters of these indices.
std::vector<at::Tensor> split_by(const at::Tensor& buffer,
                                 const std::vector<at::Tensor>& parameters,
                                 const std::vector<size_t>& indices) {
  std::vector<int64_t> sizes;
  for (const size_t index : indices) sizes.push_back(parameters[index].numel());
  return buffer.split_with_sizes(sizes);
}

}  // namespace

std::shared_ptr<AttachedModel> AttachedModel::attach(const std::shared_ptr<Session>& session,
                                                     std::vector<std::string> names,
                                                     const std::vector<at::Tensor>& parameters,
                                                     Options options) {
  auto model =
      std::make_shared<AttachedModel>(session, std::move(names), parameters, std::move(options));
  model->allocate_states();
  session->add_model(model);
  return model;
}

AttachedModel::AttachedModel(std::shared_ptr<Session> session, std::vector<std::string> names,
                             const std::vector<at::Tensor>& parameters, Options options)
    : session_(std::move(session)),
      names_(std::move(names)),
      parameters_(as_reals(parameters)),
      options_(std::move(options)),
      step_counter_(session_->make_step_counter()),
      capture_watch_(session_->rank() == 0 ? std::make_unique<CaptureWatch>() : nullptr) {
  validate(options_);
  TORCH_CHECK(names_.size() == parameters_.size(), "powersgd: ", names_.size(), " names for ",
              parameters_.size(), " parameters");
  for (size_t i = 0; i < parameters_.size(); ++i) {
    states_.push_back(std::make_shared<ParameterState>(i));
    strides_.push_back(memory_layout(parameters_[i]).strides);
    index_of_[parameters[i].unsafeGetTensorImpl()] = i;
  }
  compresses_ = options_.scope != Scope::kNever && outline().compressed_parameters > 0;
}

AttachedModel::~AttachedModel() = default;

void AttachedModel::allocate_states() {
  if (session_->size() == 1 || options_.scope == Scope::kNever) return;
  for (const c10::Device device : devices()) {
    if (!has_kernels(device.type())) continue;
    std::vector<ParameterState::Layout> layouts;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      const at::Tensor& parameter = parameters_[i];
      const bool here = parameter.device() == device && is_compressible(parameter.scalar_type());
      if (here && is_compressed(parameter)) layouts.push_back(layout_of(*states_[i], parameter));
    }
    if (layouts.empty()) continue;
    // The memory belongs to the engine's stream, as that of the buckets does.
    session_->run_after_steps(device, [&] { ParameterState::allocate(layouts, options_, device); });
    session_->connect(device);
  }
}

double AttachedModel::grad_scale() const {
  if (loss_scale_.defined()) return loss_scale_.item<double>();
  return grad_scale_.value_or(session_->grad_scale());
}

void AttachedModel::set_grad_scale(double scale) {
  check_grad_scale(scale);
  grad_scale_ = scale;
  loss_scale_ = at::Tensor();
}

void AttachedModel::set_loss_scale(const at::Tensor& scale) {
  TORCH_CHECK_VALUE(!scale.defined() || (scale.numel() == 1 && scale.scalar_type() == at::kFloat),
                    "loss_scale must be a tensor of one float32 element, got ", scale.scalar_type(),
                    " ", scale.sizes());
  loss_scale_ = scale;
}

std::vector<size_t> AttachedModel::find(const std::vector<at::Tensor>& parameters) const {
  std::vector<size_t> indices;
  for (const at::Tensor& parameter : parameters) {
    const auto found = index_of_.find(parameter.unsafeGetTensorImpl());
    TORCH_CHECK(found != index_of_.end(),
                "powersgd: DDP reduces a parameter that the attached model did not have; "
                "attach again after changing the model");
    check_layout(found->second);
    indices.push_back(found->second);
  }
  return indices;
}

// A state has the layout of attach, and DDP's buckets that of the wrapping or their rebuilding.
void AttachedModel::check_layout(size_t index) const {
  TORCH_CHECK(memory_layout(parameters_[index]).strides == strides_[index],
              "powersgd: the memory layout of '", names_[index],
              "' has changed since attach; convert the model before DDP wraps it");
}

c10::intrusive_ptr<c10d::Work> AttachedModel::reduce(size_t bucket, at::Tensor& buffer,
                                                     const std::vector<size_t>& parameters,
                                                     int divisor, bool more_follow,
                                                     std::vector<Use> uses) {
  const auto [compressor, step] =
      begin(bucket, buffer, parameters, std::move(uses), 1.0 / divisor, 1);
  return compressor ? session_->allreduce_compressed(compressor, buffer, step, c10d::kUnsetTimeout,
                                                     more_follow)
                    : session_->average_exact(buffer, divisor);
}

AttachedModel::Reduction AttachedModel::begin(size_t bucket, at::Tensor& buffer,
                                              const std::vector<size_t>& parameters,
                                              std::vector<Use> uses, double output_scale,
                                              double units) {
  if (parameters.empty() && session_->rank() == 0 && !std::exchange(warned_of_unknown_, true)) {
    session_->log(LogLevel::kWarning,
                  "FSDP2 reduces some of a module's parameters only, which of them is not known: "
                  "they are averaged exactly. With set_reduce_scatter_unused_params(True) it "
                  "reduces all, and they are compressed, except those that were frozen in attach");
  }
  const bool known = !parameters.empty() && !buffer.is_sparse();
  Reduction reduction;
  if (known) reduction.compressor = find_compressor(bucket, buffer, parameters);
  const bool captured = is_capturing(buffer.device());
  if (reduction.compressor && captured) captured_.insert(reduction.compressor);
  reduction.step = next_step(buffer, output_scale, units);
  reduction.step.bucket = static_cast<int64_t>(bucket);
  reduction.step.uses = std::move(uses);
  if (reduction.compressor) clear_stale_non_finite(buffer, parameters, reduction.step.uses);
  if (!unsent_residuals_.empty() && known && !captured) {  // each replay would add them again
    add_unsent_residuals(buffer, parameters, reduction.step);
  }
  return reduction;
}

// A bucket is made in the first pass that has its layout, also if that pass is still exact.
std::shared_ptr<BucketCompressor> AttachedModel::find_compressor(
    size_t bucket, const at::Tensor& buffer, const std::vector<size_t>& parameters) {
  if (!active_ || !session_->admits_attached(options_)) return nullptr;
  Bucket& made = buckets_[bucket];
  if (!made.holds(buffer, parameters)) {
    made = {};  // its memory serves the new one
    made = make_bucket(buffer, parameters);
  }
  if (!warm()) return nullptr;
  if (compresses_ && !std::exchange(announced_, true)) announce();
  return made.compressor;
}

StepInfo AttachedModel::next_step(const at::Tensor& buffer, double output_scale,
                                  double units) const {
  StepInfo step;
  step.output_scale = output_scale;
  step.step = step_;
  if (loss_scale_.defined()) {
    // The host may wait only where it reads the scale itself.
    const bool asynchronous = !buffer.is_cpu();
    step.loss_scale = loss_scale_.to(loss_scale_.options().device(buffer.device()), asynchronous);
    step.grad_scale = units;
  } else {
    step.grad_scale = grad_scale() * units;
  }
  return step;
}

AttachedModel::Bucket AttachedModel::make_bucket(const at::Tensor& buffer,
                                                 const std::vector<size_t>& parameters) {
  std::vector<ParameterShape> shapes;
  int64_t numel = 0;
  for (const size_t index : parameters) {
    shapes.push_back(memory_layout(parameters_[index]));
    numel += shapes.back().numel();
  }
  TORCH_CHECK(numel == buffer.numel(), "powersgd: a bucket holds ", buffer.numel(),
              " elements, its parameters ", numel,
              "; this version of torch lays its buckets out in a way that is not known here");
  Bucket made;
  BucketPlan plan = plan_bucket(shapes, options_);
  if (plan.compresses()) {
    std::vector<ParameterStatePtr> states;
    for (const PlannedMatrix& matrix : plan.matrices) {
      states.push_back(states_[parameters[static_cast<size_t>(matrix.parameter)]]);
    }
    made.compressor = make_compressor(std::move(plan), std::move(states), options_,
                                      buffer.scalar_type(), buffer.device(), session_->ranks(),
                                      step_counter_, workspaces_on(buffer.device()));
    session_->run_after_steps(buffer.device(), [&made] { made.compressor->prepare(); });
  }
  made.parameters = parameters;
  made.dtype = buffer.scalar_type();
  made.device = buffer.device();
  return made;
}

const Workspaces& AttachedModel::workspaces_on(c10::Device device) {
  const auto found = workspaces_.find(device);
  if (found != workspaces_.end()) return found->second;
  return workspaces_.emplace(device, Workspaces::of_pipeline()).first->second;
}

// DDP drops it unless another rank has used the parameter. That rank's gradient is not finite
// either if it holds the same old one.
void AttachedModel::clear_stale_non_finite(at::Tensor& buffer,
                                           const std::vector<size_t>& parameters,
                                           const std::vector<Use>& uses) const {
  if (uses.empty()) return;
  const std::vector<at::Tensor> gradients = split_by(buffer, parameters_, parameters);
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (uses[i] == Use::kStale) gradients[i].nan_to_num_(0, 0, 0);
  }
}

// Every rank adds the mean residual once it uses the parameter, so that the averages hold it once.
// The output of a parameter that no rank uses would be dropped.
void AttachedModel::add_unsent_residuals(at::Tensor& buffer, const std::vector<size_t>& parameters,
                                         const StepInfo& step) {
  const std::vector<at::Tensor> gradients = split_by(buffer, parameters_, parameters);
  for (size_t i = 0; i < gradients.size(); ++i) {
    const auto residual = unsent_residuals_.find(parameters[i]);
    const bool used = step.uses.empty() || step.uses[i] == Use::kUsed;
    if (!used || residual == unsent_residuals_.end()) continue;
    at::Tensor added = residual->second.to(buffer.device()).flatten();
    if (step.loss_scale.defined()) added = added.mul(step.loss_scale);
    gradients[i].add_(added, step.grad_scale);
    unsent_residuals_.erase(residual);
  }
}

Outline AttachedModel::outline() const {
  Outline outline;
  for (const at::Tensor& parameter : parameters_) {
    if (!parameter.requires_grad()) continue;
    const MatrixShape shape = matrix_shape(memory_layout(parameter));
    const int64_t numel = parameter.numel();
    ++outline.parameters;
    outline.numel += numel;
    const SentNumel sent = sent_numel(shape, options_);
    if (sent.rank > 0) {
      ++outline.compressed_parameters;
      outline.compressed_numel += numel;
    }
    outline.sent_numel += sent.total;
    outline.bytes_before += numel * static_cast<int64_t>(parameter.element_size());
    outline.bytes_after += content_bytes(plan_bucket({memory_layout(parameter)}, options_),
                                         options_, parameter.scalar_type());
  }
  outline.sent_numel += outline.compressed_parameters > 0;  // the bucket's non-finite count
  return outline;
}

void AttachedModel::announce() const {
  const Outline all = outline();
  session_->log(
      LogLevel::kInfo,
      c10::str("compression starts at step ", step(), ": rank ", options_.matrix_approximation_rank,
               ", ", all.compressed_parameters, " of ", all.parameters,
               " parameters as low-rank factors, ", all.numel, " elements a step sent as ",
               all.sent_numel, ", error feedback ", options_.use_error_feedback ? "on" : "off",
               ", warm start ", options_.warm_start ? "on" : "off"));
}

std::vector<c10::Device> AttachedModel::devices() const {
  std::vector<c10::Device> devices;
  for (const at::Tensor& parameter : parameters_) {
    if (std::find(devices.begin(), devices.end(), parameter.device()) == devices.end()) {
      devices.push_back(parameter.device());
    }
  }
  return devices;
}

void AttachedModel::abandon_step() {
  end_step();
  step_skipped();
}

void AttachedModel::end_step() {
  ++step_;
  session_->flush();
  const std::vector<c10::Device> on = devices();
  const bool captured = std::any_of(on.begin(), on.end(), is_capturing);
  session_->end_step(options_, captured);
  if (captured) return;  // what follows reads from the device
  watch_captured();
  if (options_.check_every == 0 || step_ % static_cast<uint64_t>(options_.check_every) != 0) return;
  for (const c10::Device device : on) {
    std::vector<Replica> replicas;
    for (size_t i = 0; i < states_.size(); ++i) {
      if (parameters_[i].device() != device) continue;
      replicas.push_back({"'" + names_[i] + "'", states_[i]});
    }
    session_->check_replicas(std::move(replicas), device);
  }
}

}  // namespace powersgd
