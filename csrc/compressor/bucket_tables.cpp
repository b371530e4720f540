// SPDX-License-Identifier: BSD-3-Clause
#include "compressor/bucket_tables.h"

#include <ATen/ATen.h>

#include <cstring>

#include "compressor/stages.h"

namespace powersgd {
namespace {

template <typename T>
at::Tensor upload(const std::vector<T>& table, at::Device device) {
  at::Tensor host = at::empty({static_cast<int64_t>(table.size() * sizeof(T))}, at::kByte);
  if (!table.empty()) std::memcpy(host.data_ptr(), table.data(), table.size() * sizeof(T));
  return host.to(device);
}

std::vector<kernels::RawSegment> raw_table(const BucketPlan& plan) {
  std::vector<kernels::RawSegment> table;
  for (const PlannedRaw& raw : plan.raw) {
    table.push_back({raw.gradient_offset, raw.numel, raw.p_offset});
  }
  return table;
}

kernels::Bucket bucket_without_tables(const BucketSpec& spec, StepCounter* step_counter) {
  kernels::Bucket bucket{};
  bucket.p_numel = spec.plan.p_numel;
  bucket.q_numel = spec.plan.q_numel;
  bucket.step_counts = step_counter ? step_counter->on(spec.device) : nullptr;
  bucket.gradient_dtype = to_dtype(spec.gradient_type);
  bucket.residual_dtype = to_dtype(residual_type(spec.gradient_type, spec.options));
  bucket.factor_dtype = to_dtype(factor_type(spec.gradient_type));
  bucket.wire_dtype = to_dtype(spec.wire_type());
  bucket.chooses_scales = bucket.wire_dtype == DType::kFloat16;
  bucket.raw_offset = spec.plan.raw_offset();
  bucket.counts_offset = spec.plan.counts_offset();
  bucket.epsilon = spec.options.orthogonalization_epsilon;
  bucket.seed = static_cast<uint64_t>(spec.options.random_seed);
  return bucket;
}

// `states[i]` belongs to `plan.matrices[i]`.
std::vector<kernels::Matrix> matrix_table(const BucketPlan& plan,
                                          const std::vector<ParameterStatePtr>& states) {
  std::vector<kernels::Matrix> table;
  for (size_t i = 0; i < states.size(); ++i) {
    const PlannedMatrix& planned = plan.matrices[i];
    const ParameterState& state = *states[i];
    kernels::Matrix matrix{};
    matrix.rows = planned.shape.rows;
    matrix.cols = planned.shape.cols;
    matrix.rank = planned.rank;
    matrix.gradient_offset = planned.gradient_offset;
    matrix.p_offset = planned.p_offset;
    matrix.q_offset = planned.q_offset;
    matrix.memory = state.memory.defined() ? state.memory.data_ptr() : nullptr;
    matrix.p_hat = state.p_hat.data_ptr();
    matrix.q_local = state.q_local.data_ptr();
    matrix.q_warm = state.q_warm.data_ptr();
    matrix.random_id = state.random_id;
    matrix.active_offset = planned.active_offset;
    table.push_back(matrix);
  }
  return table;
}

}  // namespace

BucketTables::BucketTables(const kernels::Bucket& bucket,
                           const std::vector<kernels::Matrix>& matrices,
                           const std::vector<kernels::RawSegment>& raw, at::Device device)
    : bucket_(bucket) {
  const Stages& stages = require_stages(device.type());
  const kernels::TileTable tiles =
      stages.make_tiles(matrices, raw, bucket.factor_dtype, bucket.wire_dtype);
  matrices_ = upload(matrices, device);
  raw_segments_ = upload(raw, device);
  tiles_ = upload(tiles.tiles, device);
  workspace_ = at::empty({static_cast<int64_t>(tiles.workspace_bytes)},
                         at::TensorOptions(device).dtype(at::kByte));
  bucket_.matrices = static_cast<const kernels::Matrix*>(matrices_.data_ptr());
  bucket_.raw_segments = static_cast<const kernels::RawSegment*>(raw_segments_.data_ptr());
  bucket_.tiles = static_cast<const kernels::Tile*>(tiles_.data_ptr());
  bucket_.num_matrices = static_cast<int32_t>(matrices.size());
  bucket_.num_raw_segments = static_cast<int32_t>(raw.size());
  bucket_.tile_list_begin = tiles.list_begin;
  bucket_.largest_rank = tiles.largest_rank;
  bucket_.workspace = workspace_.data_ptr();
  counters_ = at::zeros({tiles.num_counters}, at::TensorOptions(device).dtype(at::kLong));
  bucket_.counters = static_cast<uint64_t*>(counters_.data_ptr());
  static_assert(sizeof(kernels::BucketState) % sizeof(int64_t) == 0);
  state_ = at::zeros({sizeof(kernels::BucketState) / sizeof(int64_t)},
                     at::TensorOptions(device).dtype(at::kLong));
  bucket_.state = static_cast<kernels::BucketState*>(state_.data_ptr());
}

BucketTables::BucketTables(const BucketSpec& spec, const std::vector<ParameterStatePtr>& states,
                           StepCounter* step_counter)
    : BucketTables(bucket_without_tables(spec, step_counter), matrix_table(spec.plan, states),
                   raw_table(spec.plan), spec.device) {}

void BucketTables::set_payloads(const Payloads& payloads, const at::Tensor& rounding) {
  bucket_.p_payload = payloads.p.data_ptr();
  bucket_.q_payload = payloads.q.data_ptr();
  bucket_.wire_dtype = to_dtype(payloads.p.scalar_type());
  bucket_.rounding = bucket_.wire_dtype == bucket_.factor_dtype ? nullptr : rounding.data_ptr();
}

void BucketTables::begin_step(const at::Tensor& gradient, const StepInfo& step,
                              double residual_scale) {
  bucket_.gradient = gradient.data_ptr();
  bucket_.residual_scale = residual_scale;
  bucket_.drop_residual = step.drop_residual;
  bucket_.output_scale = step.output_scale;
  bucket_.step = step.step;
}

}  // namespace powersgd
