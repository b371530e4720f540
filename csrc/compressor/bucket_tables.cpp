// SPDX-License-Identifier: BSD-3-Clause
#include "compressor/bucket_tables.h"

#include <ATen/ATen.h>

#include <cstring>

#include "compressor/stages.h"

namespace powersgd {
namespace {

constexpr size_t kAlignment = 64;

size_t padded(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

template <typename T>
size_t padded_bytes(const std::vector<T>& table) {
  return padded(table.size() * sizeof(T));
}

// Appends a table to the host's copy, and returns its place on the device.
template <typename T>
const T* append(const std::vector<T>& table, const at::Tensor& host, const at::Tensor& on_device,
                size_t& offset) {
  const size_t begin = offset;
  const size_t bytes = table.size() * sizeof(T);
  if (bytes > 0) std::memcpy(static_cast<char*>(host.data_ptr()) + begin, table.data(), bytes);
  offset += padded(bytes);
  return reinterpret_cast<const T*>(static_cast<const char*>(on_device.data_ptr()) + begin);
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
  bucket.warm_start_noise = spec.options.warm_start_noise;
  bucket.seed = static_cast<uint64_t>(spec.options.random_seed);
  return bucket;
}

std::vector<kernels::Matrix> matrices_without_states(const BucketPlan& plan) {
  std::vector<kernels::Matrix> table;
  for (const PlannedMatrix& planned : plan.matrices) {
    kernels::Matrix& matrix = table.emplace_back();
    matrix.rows = planned.shape.rows;
    matrix.cols = planned.shape.cols;
    matrix.rank = planned.rank;
    matrix.gradient_offset = planned.gradient_offset;
    matrix.p_offset = planned.p_offset;
    matrix.q_offset = planned.q_offset;
    matrix.active_offset = planned.active_offset;
  }
  return table;
}

// `states[i]` belongs to `plan.matrices[i]`.
std::vector<kernels::Matrix> matrix_table(const BucketPlan& plan,
                                          const std::vector<ParameterStatePtr>& states) {
  std::vector<kernels::Matrix> table = matrices_without_states(plan);
  for (size_t i = 0; i < states.size(); ++i) {
    kernels::Matrix& matrix = table[i];
    const ParameterState& state = *states[i];
    matrix.memory = state.memory.defined() ? state.memory.data_ptr() : nullptr;
    matrix.p_hat = state.p_hat.data_ptr();
    matrix.q_local = state.q_local.data_ptr();
    matrix.q_warm = state.q_warm.data_ptr();
    matrix.random_id = state.random_id;
    matrix.grad_scale = state.grad_scale.data_ptr<double>();
  }
  return table;
}

int64_t bytes_to_upload(const std::vector<kernels::Matrix>& matrices,
                        const std::vector<kernels::RawSegment>& raw,
                        const kernels::TileTable& tiles) {
  return static_cast<int64_t>(padded_bytes(matrices) + padded_bytes(raw) +
                              padded_bytes(tiles.tiles));
}

}  // namespace

at::Tensor upload_tables(kernels::Bucket& bucket, const std::vector<kernels::Matrix>& matrices,
                         const std::vector<kernels::RawSegment>& raw,
                         const kernels::TileTable& tiles, at::Device device) {
  const int64_t bytes = bytes_to_upload(matrices, raw, tiles);
  // torch's allocator keeps a pinned block until the copies that read it have ended.
  const at::Tensor host =
      at::empty({bytes}, at::TensorOptions(at::kByte).pinned_memory(device.is_cuda()));
  const at::Tensor on_device =
      device.is_cpu() ? host : at::empty({bytes}, at::TensorOptions(device).dtype(at::kByte));
  size_t offset = 0;
  bucket.matrices = append(matrices, host, on_device, offset);
  bucket.raw_segments = append(raw, host, on_device, offset);
  bucket.tiles = append(tiles.tiles, host, on_device, offset);
  bucket.num_matrices = static_cast<int32_t>(matrices.size());
  bucket.num_raw_segments = static_cast<int32_t>(raw.size());
  bucket.tile_list_begin = tiles.list_begin;
  bucket.largest_rank = tiles.largest_rank;
  if (!device.is_cpu()) on_device.copy_(host, /*non_blocking=*/true);
  return on_device;
}

BytesOfTables bytes_of_tables(const BucketPlan& plan, DType factor_dtype, DType wire_dtype,
                              at::DeviceType device) {
  const std::vector<kernels::Matrix> matrices = matrices_without_states(plan);
  const std::vector<kernels::RawSegment> raw = raw_table(plan);
  const kernels::TileTable tiles =
      require_stages(device).make_tiles(matrices, raw, factor_dtype, wire_dtype);
  return {bytes_to_upload(matrices, raw, tiles) +
              tiles.num_counters * static_cast<int64_t>(sizeof(uint64_t)) +
              static_cast<int64_t>(sizeof(kernels::BucketState)),
          static_cast<int64_t>(tiles.workspace_bytes)};
}

BucketTables::BucketTables(const kernels::Bucket& bucket,
                           const std::vector<kernels::Matrix>& matrices,
                           const std::vector<kernels::RawSegment>& raw, at::Device device,
                           const Workspaces& workspaces)
    : bucket_(bucket), workspaces_(workspaces) {
  const Stages& stages = require_stages(device.type());
  const kernels::TileTable tiles =
      stages.make_tiles(matrices, raw, bucket.factor_dtype, bucket.wire_dtype);
  tables_ = upload_tables(bucket_, matrices, raw, tiles, device);
  for (const auto& workspace : {workspaces_.first, workspaces_.second}) {
    workspace->reserve(static_cast<int64_t>(tiles.workspace_bytes), device);
  }
  counters_ = at::zeros({tiles.num_counters}, at::TensorOptions(device).dtype(at::kLong));
  bucket_.counters = static_cast<uint64_t*>(counters_.data_ptr());
  static_assert(sizeof(kernels::BucketState) % sizeof(int64_t) == 0);
  state_ = at::zeros({sizeof(kernels::BucketState) / sizeof(int64_t)},
                     at::TensorOptions(device).dtype(at::kLong));
  bucket_.state = static_cast<kernels::BucketState*>(state_.data_ptr());
}

BucketTables::BucketTables(const BucketSpec& spec, const std::vector<ParameterStatePtr>& states,
                           StepCounter* step_counter, const Workspaces& workspaces)
    : BucketTables(bucket_without_tables(spec, step_counter), matrix_table(spec.plan, states),
                   raw_table(spec.plan), spec.device, workspaces) {}

void BucketTables::set_payloads(const Payloads& payloads, const at::Tensor& rounding) {
  bucket_.p_payload = payloads.p.data_ptr();
  bucket_.q_payload = payloads.q.data_ptr();
  bucket_.wire_dtype = to_dtype(payloads.p.scalar_type());
  bucket_.rounding = bucket_.wire_dtype == bucket_.factor_dtype ? nullptr : rounding.data_ptr();
}

void BucketTables::begin_step(const at::Tensor& gradient, const StepInfo& step, bool is_captured) {
  bucket_.workspace = workspaces_.first->data();
  if (is_captured) {
    workspaces_.first->captured();
    workspaces_.second->captured();
  }
  bucket_.gradient = gradient.data_ptr();
  bucket_.loss_scale = step.loss_scale.defined() ? step.loss_scale.data_ptr<float>() : nullptr;
  bucket_.grad_scale = step.grad_scale;
  bucket_.drop_residual = step.drop_residual;
  bucket_.output_scale = step.output_scale;
  bucket_.step = is_captured ? kernels::kNextStep : step.step;
}

}  // namespace powersgd
