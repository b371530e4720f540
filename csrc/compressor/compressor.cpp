// SPDX-License-Identifier: BSD-3-Clause
#include "powersgd/compressor/compressor.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "compressor/bucket_spec.h"
#include "compressor/bucket_states.h"
#include "compressor/bucket_tables.h"
#include "compressor/device_stages.h"
#include "compressor/payloads.h"
#include "compressor/streams.h"
#include "compressor/torch_products.h"

namespace powersgd {
namespace {

// Runs the stages over tables of pointers to the states, the payloads and the gradient.
class StagesCompressor final : public BucketCompressor {
 public:
  StagesCompressor(BucketSpec spec, std::vector<ParameterStatePtr> states,
                   std::shared_ptr<StepCounter> step_counter, Workspaces workspaces)
      : spec_(std::move(spec)),
        plans_(plan_payloads(spec_)),
        step_counter_(std::move(step_counter)),
        workspaces_(std::move(workspaces)),
        stages_(require_stages(spec_.device.type())),
        states_(std::move(states)) {}

  void prepare() override {
    if (prepared_) return;
    TORCH_CHECK(!stages_.is_capturing(),
                "powersgd: a CUDA graph cannot capture the first steps of a bucket, which allocate "
                "its buffers: run at least 3 steps before the capture");
    states_.allocate(spec_);
    make_payloads();
    prepared_ = true;
  }

  Payload& project(const at::Tensor& gradient, const StepInfo& step) override {
    spec_.check(gradient);
    prepare();
    states_.begin_step(spec_.plan, gradient, step);
    if (step.loss_scale.defined()) use_on_current_stream(step.loss_scale);
    tables_.begin_step(spec_.plan, gradient, step, stages_.is_capturing());
    if (!spec_.options.warm_start) stages_.random_start(tables_.bucket());
    if (products_) products_->subtract_sent();
    stages_.project(tables_.bucket());
    states_.projected(gradient);
    if (products_) products_->project(gradient);
    return *p_;
  }

  void orthogonalize() override {
    tables_.begin_second_part();
    if (products_) {
      products_->orthogonalize();
    } else {
      stages_.orthogonalize(tables_.bucket());
    }
  }

  Payload& back_project() override {
    if (products_) {
      products_->back_project(states_.gradient());
    } else {
      stages_.back_project(tables_.bucket());
    }
    return *q_;
  }

  void reconstruct() override {
    stages_.reconstruct(tables_.bucket());
    if (products_) products_->reconstruct(states_.gradient(), tables_.bucket().output_scale);
    states_.end_step(spec_.plan, p_->elements());
  }

  void rollback() override { states_.rollback(spec_.plan); }

  int64_t payload_bytes() const override { return plans_.p.wire_bytes + plans_.q.wire_bytes; }
  int64_t gradient_bytes() const override { return spec_.gradient_bytes(); }
  bool in_two_levels() const override { return plans_.p.levels || plans_.q.levels; }
  int64_t approximation_rank() const override {
    int64_t largest = 0;
    for (const auto& matrix : spec_.plan.matrices) largest = std::max(largest, matrix.rank);
    return largest;
  }
  std::vector<ParameterStatePtr> states() const override { return states_.of_matrices(); }

 private:
  void make_payloads() {
    const at::TensorOptions factors = spec_.factor_options();
    const Payloads elements{at::zeros({plans_.p.padded_numel}, factors),
                            at::zeros({plans_.q.padded_numel}, factors)};
    tables_ =
        BucketTables(spec_, states_.of_matrices(), step_counter_.get(), workspaces_, elements);
    if (!stages_.multiplies(tables_.bucket())) {
      products_.emplace(spec_.plan, states_.of_matrices(), elements, tables_.skipped(),
                        spec_.options.orthogonalization_epsilon);
    }
    kernels::Packets p{}, q{};
    const DeviceTables& tables = tables_.tables();
    p.factors = tables.p_factors;
    p.num_factors = tables.num_p_factors;
    q.factors = tables.q_factors;
    q.num_factors = tables.num_q_factors;
    p.raw_dtype = q.raw_dtype = kernels::raw_dtype_of(to_dtype(spec_.gradient_type));
    p_ = make_payload(plans_.p, elements.p, p, stages_);
    q_ = make_payload(plans_.q, elements.q, q, stages_);
  }

  const BucketSpec spec_;
  const PayloadPlans plans_;
  const std::shared_ptr<StepCounter> step_counter_;
  const Workspaces workspaces_;
  const Stages& stages_;
  BucketStates states_;
  bool prepared_ = false;  // prepare() makes everything below
  BucketTables tables_;
  std::optional<TorchProducts> products_;
  std::unique_ptr<Payload> p_, q_;
};

}  // namespace

MemoryNeeds memory_needs(const BucketPlan& plan, const Options& options,
                         at::ScalarType gradient_type, c10::DeviceType device, Ranks ranks) {
  MemoryNeeds needs;
  if (!plan.compresses()) return needs;
  const BucketSpec spec{plan, options, gradient_type, at::Device(device), std::move(ranks)};
  const int64_t factor = size_of(DType::kFloat32);
  int64_t numel = 0;
  for (const PlannedMatrix& matrix : plan.matrices) {
    const auto [rows, cols] = matrix.shape;
    numel += rows * cols;
    needs.factors += (rows + 2 * cols) * matrix.rank * factor;
  }
  if (options.use_error_feedback) {
    needs.residual = numel * size_of(options.residual_dtype);
  }
  if (options.allow_discard) {
    needs.factors *= 2;
    needs.residual *= 2;
  }
  const PayloadPlans payloads = plan_payloads(spec);
  for (const PayloadPlan& payload : {payloads.p, payloads.q}) {
    needs.payloads += payload.padded_numel * factor * (payload.levels ? 2 : 1);
    needs.payloads += payload.buffer_bytes;
  }
  const BytesOfTables bytes = bytes_of_tables(spec);
  needs.tables = bytes.tables;
  needs.workspace = bytes.workspace;
  return needs;
}

bool has_kernels(c10::DeviceType device) { return find_stages(device) != nullptr; }

std::unique_ptr<BucketCompressor> make_compressor(
    BucketPlan plan, std::vector<ParameterStatePtr> states, const Options& options,
    at::ScalarType gradient_type, at::Device device, Ranks ranks,
    std::shared_ptr<StepCounter> step_counter, Workspaces workspaces) {
  TORCH_INTERNAL_ASSERT(states.size() == plan.matrices.size());
  to_dtype(gradient_type);  // throws for a dtype that is not compressed
  return std::make_unique<StagesCompressor>(
      BucketSpec{std::move(plan), options, gradient_type, device, std::move(ranks)},
      std::move(states), std::move(step_counter), std::move(workspaces));
}

}  // namespace powersgd
