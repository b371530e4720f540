// SPDX-License-Identifier: BSD-3-Clause
#include "backend/attached_model.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

#include "backend/parameter_layout.h"
#include "backend/stats.h"

namespace powersgd {
namespace {

// The engine's stream made it, the caller's will read it: keep its memory until both are done.
void use_on_current_stream(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return;
  const c10::impl::VirtualGuardImpl impl(tensor.device().type());
  impl.recordDataPtrOnStream(tensor.storage().data_ptr(), impl.getStream(tensor.device()));
}

}  // namespace

AttachedModel::AttachedModel(c10::intrusive_ptr<BackendPowerSGD> backend,
                             std::vector<std::string> names, std::vector<at::Tensor> parameters,
                             Options options)
    : backend_(std::move(backend)),
      names_(std::move(names)),
      parameters_(std::move(parameters)),
      options_(std::move(options)),
      skips_(backend_->make_skip_counter()) {
  TORCH_CHECK(names_.size() == parameters_.size(), "powersgd: ", names_.size(), " names for ",
              parameters_.size(), " parameters");
  for (size_t i = 0; i < parameters_.size(); ++i) {
    states_.push_back(std::make_shared<ParameterState>());
    states_.back()->stream = i;
    index_of_[parameters_[i].unsafeGetTensorImpl()] = i;
  }
}

double AttachedModel::grad_scale() const { return backend_->grad_scale(); }

c10::intrusive_ptr<c10d::Work> AttachedModel::reduce(c10d::GradBucket& bucket, int divisor) {
  at::Tensor& gradient = bucket.getBufferRef();
  std::shared_ptr<BucketCompressor> compressor;
  const bool warm = step_ >= static_cast<uint64_t>(options_.start_powerSGD_iter);
  if (active_ && warm && backend_->admits_attached(options_) && !gradient.is_sparse()) {
    if (!std::exchange(announced_, true)) announce();
    compressor = find_bucket(bucket).compressor;
  }
  StepInfo step;
  step.output_scale = 1.0 / divisor;
  step.grad_scale = grad_scale();
  step.step = step_;
  if (bucket.isLast()) end_step();
  if (!compressor) return backend_->allreduce_average_exact(gradient, divisor);
  return backend_->allreduce_compressed(compressor, gradient, step);
}

AttachedModel::Bucket& AttachedModel::find_bucket(c10d::GradBucket& bucket) {
  std::vector<size_t> indices;
  for (const at::Tensor& parameter : bucket.getParameters()) {
    const auto found = index_of_.find(parameter.unsafeGetTensorImpl());
    TORCH_CHECK(found != index_of_.end(),
                "powersgd: DDP reduces a parameter that the attached model did not have; "
                "attach again after changing the model");
    indices.push_back(found->second);
  }
  Bucket& known = buckets_[bucket.getIndex()];
  if (known.parameters != indices) known = make_bucket(bucket, std::move(indices));
  return known;
}

AttachedModel::Bucket AttachedModel::make_bucket(c10d::GradBucket& bucket,
                                                 std::vector<size_t> indices) const {
  const at::Tensor& buffer = bucket.getBufferRef();
  std::vector<ParameterShape> shapes;
  int64_t numel = 0;
  for (const size_t index : indices) {
    shapes.push_back(memory_layout(parameters_[index]));
    numel += shapes.back().numel();
  }
  TORCH_CHECK(numel == buffer.numel(), "powersgd: DDP's bucket ", bucket.getIndex(), " holds ",
              buffer.numel(), " elements, its parameters ", numel,
              "; this version of torch lays its buckets out in a way that is not known here");
  Bucket made;
  made.plan = plan_bucket(shapes, options_);
  if (made.plan.compresses()) {
    std::vector<ParameterStatePtr> states;
    for (const PlannedMatrix& matrix : made.plan.matrices) {
      states.push_back(states_[indices[static_cast<size_t>(matrix.parameter)]]);
    }
    made.compressor = std::make_shared<BucketCompressor>(
        made.plan, std::move(states), options_, buffer.scalar_type(), buffer.device(), skips_);
  }
  made.parameters = std::move(indices);
  return made;
}

void AttachedModel::announce() const {
  std::vector<ParameterShape> shapes;
  for (const at::Tensor& parameter : parameters_) {
    if (parameter.requires_grad()) shapes.push_back(memory_layout(parameter));
  }
  const BucketPlan whole = plan_bucket(shapes, options_);
  const int64_t sent = whole.p_numel + whole.q_numel;
  backend_->log(LogLevel::kInfo,
                c10::str("compression starts at step ", step_, ": rank ",
                         options_.matrix_approximation_rank, ", ", whole.matrices.size(), " of ",
                         shapes.size(), " parameters as low-rank factors, ", whole.gradient_numel,
                         " elements a step sent as ", sent, ", error feedback ",
                         options_.use_error_feedback ? "on" : "off", ", warm start ",
                         options_.warm_start ? "on" : "off"));
}

void AttachedModel::end_step() {
  ++step_;
  backend_->end_step(options_);
}

std::vector<ParameterExport> AttachedModel::export_state() {
  std::vector<ParameterExport> exported(parameters_.size());
  for (size_t i = 0; i < parameters_.size(); ++i) {
    exported[i].name = names_[i];
    if (!states_[i]->allocated()) continue;
    const at::Tensor& parameter = parameters_[i];
    std::vector<at::Tensor> mean(1);
    backend_->run_after_steps(parameter.device(), [&] {
      mean[0] = residual(*states_[i]).mul_(grad_scale() / states_[i]->grad_scale);
      exported[i].q = q_to_parameter_order(states_[i]->q_warm.clone(), parameter);
    });
    backend_->average_over_lane(mean);
    use_on_current_stream(mean[0]);
    use_on_current_stream(exported[i].q);
    exported[i].residual = to_parameter_order(mean[0], parameter);
  }
  return exported;
}

void AttachedModel::load_state(const std::vector<ParameterExport>& parameters, int64_t step,
                               double grad_scale) {
  std::map<std::string, size_t> index_of_name;
  for (size_t i = 0; i < names_.size(); ++i) index_of_name[names_[i]] = i;
  std::vector<std::pair<size_t, const ParameterExport*>> accepted;
  for (const ParameterExport& parameter : parameters) {
    const auto found = index_of_name.find(parameter.name);
    if (found == index_of_name.end()) {
      backend_->log(LogLevel::kWarning, c10::str("the checkpoint's parameter '", parameter.name,
                                                 "' is not in the model: its residual is dropped"));
      continue;
    }
    if (may_load(found->second, parameter)) accepted.emplace_back(found->second, &parameter);
  }
  // All of it is known to fit before any of it is loaded.
  for (const auto& [index, parameter] : accepted) load_parameter(index, *parameter, grad_scale);
  step_ = static_cast<uint64_t>(step);
}

// Throws if it does not fit; false if there is nothing to load it into.
bool AttachedModel::may_load(size_t index, const ParameterExport& saved) const {
  if (!saved.residual.defined()) return false;
  const at::Tensor& parameter = parameters_[index];
  const MatrixShape shape = matrix_shape(memory_layout(parameter));
  TORCH_CHECK_VALUE(saved.residual.sizes() == parameter.sizes(), "residual of '", saved.name,
                    "' must have the parameter's shape ", parameter.sizes(), ", got ",
                    saved.residual.sizes());
  TORCH_CHECK_VALUE(saved.q.dim() == 2 && saved.q.size(1) == shape.cols, "q of '", saved.name,
                    "' must have the shape [rank, ", shape.cols, "], got ", saved.q.sizes());
  if (should_compress(shape, options_)) return true;
  backend_->log(LogLevel::kWarning,
                c10::str("'", saved.name,
                         "' is not compressed with these options: the checkpoint's "
                         "residual of it is dropped"));
  return false;
}

void AttachedModel::load_parameter(size_t index, const ParameterExport& saved, double grad_scale) {
  const at::Tensor& parameter = parameters_[index];
  const MatrixShape shape = matrix_shape(memory_layout(parameter));
  ParameterState& state = *states_[index];
  const int64_t rank = effective_rank(shape, options_);
  const at::Tensor q = q_to_memory_order(saved.q, parameter);
  backend_->run_after_steps(parameter.device(), [&] {
    if (!state.allocated()) {
      allocate(state, shape, rank, options_, parameter.scalar_type(), parameter.device());
    }
    set_residual(state, to_memory_order(saved.residual, parameter));
    state.grad_scale = grad_scale;
    const int64_t kept = std::min(rank, q.size(0));
    state.q_warm.narrow(0, 0, kept).copy_(q.narrow(0, 0, kept));
  });
  if (q.size(0) != rank) {
    backend_->log(LogLevel::kInfo, c10::str("'", saved.name, "': the checkpoint's rank ", q.size(0),
                                            " factor was taken over at rank ", rank));
  }
}

std::map<std::string, double> AttachedModel::residual_norms() {
  std::map<std::string, double> norms;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    double& norm = norms[names_[i]];
    if (!states_[i]->allocated()) continue;
    backend_->run_after_steps(parameters_[i].device(), [&] {
      norm = residual(*states_[i]).norm().item<double>() * grad_scale() / states_[i]->grad_scale;
    });
  }
  return norms;
}

}  // namespace powersgd
