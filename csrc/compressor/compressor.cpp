// SPDX-License-Identifier: BSD-3-Clause
#include "powersgd/compressor.h"

#include <ATen/ATen.h>

#include <utility>

#include "compressor/bucket_spec.h"
#include "compressor/bucket_states.h"
#include "compressor/bucket_tables.h"
#include "compressor/stages.h"
#include "compressor/streams.h"
#include "compressor/wire_payload.h"

namespace powersgd {
namespace {

// Runs the stages over tables of pointers to the states, the payloads and the gradient.
class StagesCompressor final : public BucketCompressor {
 public:
  StagesCompressor(BucketSpec spec, std::vector<ParameterStatePtr> states,
                   std::shared_ptr<StepCounter> step_counter)
      : spec_(std::move(spec)),
        step_counter_(std::move(step_counter)),
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
    if (step.drop_residual) p_wire_.drop_rounding();
    return p_wire_.pack();
  }

  void orthogonalize() override {
    p_wire_.unpack();
    stages_.orthogonalize(tables_.bucket());
  }

  at::Tensor& back_project() override {
    stages_.back_project(tables_.bucket());
    at::Tensor& packed = q_wire_.pack();
    // The rounding was not sent: the residual keeps it, because it is made of q_local.
    if (q_wire_.rounds()) at::_foreach_copy_(q_local_, q_sent_);
    return packed;
  }

  void reconstruct() override {
    q_wire_.unpack();
    stages_.reconstruct(tables_.bucket());
    states_.end_step();
  }

  void rollback() override { states_.rollback(spec_.plan); }

  int64_t payload_bytes() const override {
    return spec_.wire_bytes(spec_.plan.p_numel + spec_.plan.q_numel);
  }
  int64_t gradient_bytes() const override { return spec_.gradient_bytes(); }
  std::vector<ParameterStatePtr> states() const override { return states_.of_matrices(); }

 private:
  void make_payloads() {
    const BucketPlan& plan = spec_.plan;
    at::Tensor p_payload = at::zeros({plan.p_numel}, spec_.factor_options());
    at::Tensor q_payload = at::zeros({plan.q_numel}, spec_.factor_options());
    tables_ = BucketTables(spec_, states_.of_matrices(), step_counter_.get(), p_payload, q_payload);
    p_wire_ = WirePayload(p_payload, spec_.wire_type(), plan.counts_offset());
    q_wire_ = WirePayload(q_payload, spec_.wire_type(), plan.q_numel);
    if (p_wire_.rounds()) {
      p_wire_.carry_rounding(p_payload.narrow(0, plan.raw_offset(), spec_.raw_numel()));
      pair_q(q_payload);
    }
  }

  void pair_q(const at::Tensor& q_payload) {
    q_local_.clear();
    q_sent_.clear();
    for (size_t i = 0; i < spec_.plan.matrices.size(); ++i) {
      const at::Tensor& q = states_.of_matrices()[i]->q_local;
      const int64_t offset = spec_.plan.matrices[i].q_offset;
      q_local_.push_back(q);
      q_sent_.push_back(q_payload.narrow(0, offset, q.numel()).view(q.sizes()));
    }
  }

  const BucketSpec spec_;
  const std::shared_ptr<StepCounter> step_counter_;
  const Stages& stages_;
  BucketStates states_;
  bool prepared_ = false;  // prepare() makes all that follows
  WirePayload p_wire_, q_wire_;
  BucketTables tables_;
  std::vector<at::Tensor> q_sent_, q_local_;  // by matrix: its part of the Q payload, and q_local
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
  needs.payloads = payloads * factor;
  if (spec.wire_type() != factor_type(gradient_type)) {
    needs.payloads += spec.wire_bytes(payloads) + spec.raw_numel() * factor;
  }
  needs.tables = bytes_of_tables(plan, to_dtype(factor_type(gradient_type)), device);
  return needs;
}

bool has_kernels(c10::DeviceType device) { return find_stages(device) != nullptr; }

std::unique_ptr<BucketCompressor> make_compressor(BucketPlan plan,
                                                  std::vector<ParameterStatePtr> states,
                                                  const Options& options,
                                                  at::ScalarType gradient_type, at::Device device,
                                                  std::shared_ptr<StepCounter> step_counter) {
  TORCH_INTERNAL_ASSERT(states.size() == plan.matrices.size());
  to_dtype(gradient_type);  // throws for a dtype that is not compressed
  return std::make_unique<StagesCompressor>(
      BucketSpec{std::move(plan), options, gradient_type, device}, std::move(states),
      std::move(step_counter));
}

}  // namespace powersgd
