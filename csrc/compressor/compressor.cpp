// SPDX-License-Identifier: BSD-3-Clause
#include "powersgd/compressor.h"

#include <ATen/ATen.h>

#include <utility>

#include "compressor/bucket_spec.h"
#include "compressor/bucket_states.h"
#include "compressor/bucket_tables.h"
#include "compressor/stages.h"
#include "compressor/streams.h"

namespace powersgd {
namespace {

// Runs the stages over tables of pointers to the states, the payloads and the gradient.
class StagesCompressor final : public BucketCompressor {
 public:
  StagesCompressor(BucketSpec spec, std::vector<ParameterStatePtr> states,
                   std::shared_ptr<StepCounter> step_counter, Workspaces workspaces)
      : spec_(std::move(spec)),
        step_counter_(std::move(step_counter)),
        workspaces_(std::move(workspaces)),
        stages_(require_stages(spec_.device.type())),
        states_(std::move(states)) {}

  void prepare() override {
    if (prepared_) return;
    TORCH_CHECK(!stages_.is_capturing(),
                "powersgd: a CUDA graph cannot capture the first step of a bucket, which allocates "
                "its tables: run at least 3 steps before the capture");
    states_.allocate(spec_);
    make_payloads();
    prepared_ = true;
  }

  at::Tensor& project(const at::Tensor& gradient, const StepInfo& step) override {
    spec_.check(gradient);
    prepare();
    states_.begin_step(step);
    if (step.loss_scale.defined()) use_on_current_stream(step.loss_scale);
    tables_.begin_step(gradient, step, stages_.is_capturing());
    if (!spec_.options.warm_start) {
      kernels::Bucket start = tables_.bucket();
      if (step.same_start) start.step = 0;
      stages_.random_start(start);
    }
    stages_.project(tables_.bucket());
    states_.projected(gradient);
    return payloads_.p;
  }

  void orthogonalize() override {
    tables_.begin_second_part();
    stages_.orthogonalize(tables_.bucket());
  }

  at::Tensor& back_project() override {
    stages_.back_project(tables_.bucket());
    return payloads_.q;
  }

  void reconstruct() override {
    stages_.reconstruct(tables_.bucket());
    states_.end_step();
    if (later_payloads_.p.defined()) end_first_payloads();
  }

  void rollback() override { states_.rollback(spec_.plan); }

  int64_t payload_bytes() const override {
    return spec_.wire_bytes(spec_.plan.p_numel + spec_.plan.q_numel);
  }
  int64_t gradient_bytes() const override { return spec_.gradient_bytes(); }
  std::vector<ParameterStatePtr> states() const override { return states_.of_matrices(); }

 private:
  void make_payloads() {
    tables_ = BucketTables(spec_, states_.of_matrices(), step_counter_.get(), workspaces_);
    const at::TensorOptions factors = spec_.factor_options();
    payloads_ = payloads_of(spec_.wire_type());
    if (spec_.wire_type() != factors.dtype()) rounding_ = at::zeros({spec_.raw_numel()}, factors);
    if (spec_.wire_type() == at::kHalf) {
      later_payloads_ = std::exchange(payloads_, payloads_of(factor_type(spec_.gradient_type)));
    }
    tables_.set_payloads(payloads_, rounding_);
  }

  Payloads payloads_of(at::ScalarType type) const {
    const at::TensorOptions options = at::device(spec_.device).dtype(type);
    return {at::zeros({spec_.plan.p_numel}, options), at::zeros({spec_.plan.q_numel}, options)};
  }

  // Lets the payloads of the first step go, unless a graph will use them again.
  void end_first_payloads() {
    const Payloads first = std::exchange(payloads_, std::exchange(later_payloads_, {}));
    tables_.set_payloads(payloads_, rounding_);
    use_on_current_stream(first.p);
    use_on_current_stream(first.q);
    if (stages_.is_capturing()) captured_payloads_ = first;
  }

  const BucketSpec spec_;
  const std::shared_ptr<StepCounter> step_counter_;
  const Workspaces workspaces_;
  const Stages& stages_;
  BucketStates states_;
  bool prepared_ = false;  // prepare() makes all that follows
  BucketTables tables_;
  Payloads payloads_;           // of the step in progress
  Payloads later_payloads_;     // in float16, defined as long as the first step travels as factors
  Payloads captured_payloads_;  // those of the first step, if a graph has captured it
  at::Tensor rounding_;         // undefined if the wire does not round
};

}  // namespace

MemoryNeeds memory_needs(const BucketPlan& plan, const Options& options,
                         at::ScalarType gradient_type, c10::DeviceType device) {
  MemoryNeeds needs;
  if (!plan.compresses()) return needs;
  const BucketSpec spec{plan, options, gradient_type, at::Device(device)};
  const auto width = [](at::ScalarType type) {
    return static_cast<int64_t>(c10::elementSize(type));
  };
  const int64_t factor = width(factor_type(gradient_type));
  int64_t numel = 0;
  for (const PlannedMatrix& matrix : plan.matrices) {
    const auto [rows, cols] = matrix.shape;
    numel += rows * cols;
    needs.factors += (rows + 2 * cols) * matrix.rank * factor;
  }
  if (options.use_error_feedback) {
    needs.residual = numel * width(residual_type(gradient_type, options));
  }
  const int64_t payloads = plan.p_numel + plan.q_numel;
  needs.payloads = spec.wire_bytes(payloads);
  if (spec.wire_type() != factor_type(gradient_type)) needs.payloads += spec.raw_numel() * factor;
  if (spec.wire_type() == at::kHalf) needs.payloads += payloads * factor;  // in the first step
  const BytesOfTables bytes = bytes_of_tables(plan, to_dtype(factor_type(gradient_type)),
                                              to_dtype(spec.wire_type()), device);
  needs.tables = bytes.tables;
  needs.workspace = bytes.workspace;
  return needs;
}

bool has_kernels(c10::DeviceType device) { return find_stages(device) != nullptr; }

std::unique_ptr<BucketCompressor> make_compressor(BucketPlan plan,
                                                  std::vector<ParameterStatePtr> states,
                                                  const Options& options,
                                                  at::ScalarType gradient_type, at::Device device,
                                                  std::shared_ptr<StepCounter> step_counter,
                                                  Workspaces workspaces) {
  TORCH_INTERNAL_ASSERT(states.size() == plan.matrices.size());
  to_dtype(gradient_type);  // throws for a dtype that is not compressed
  return std::make_unique<StagesCompressor>(
      BucketSpec{std::move(plan), options, gradient_type, device}, std::move(states),
      std::move(step_counter), std::move(workspaces));
}

}  // namespace powersgd
