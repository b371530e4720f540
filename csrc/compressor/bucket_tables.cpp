// SPDX-License-Identifier: BSD-3-Clause
#include "compressor/bucket_tables.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <utility>

#include "compressor/device_stages.h"

namespace powersgd {
namespace {

constexpr size_t kAlignment = 64;

// Tables one after the other, each at a multiple of kAlignment.
class Joined {
 public:
  // Returns where the table begins.
  template <typename T>
  size_t add(const std::vector<T>& table) {
    const size_t begin = bytes_.size();
    const size_t bytes = table.size() * sizeof(T);
    bytes_.resize(begin + (bytes + kAlignment - 1) / kAlignment * kAlignment);
    if (bytes > 0) std::memcpy(bytes_.data() + begin, table.data(), bytes);
    return begin;
  }

  at::Tensor upload(at::Device device) const {
    const auto bytes = static_cast<int64_t>(bytes_.size());
    // torch's allocator keeps a pinned block until the copies that read it have ended.
    const at::Tensor host =
        at::empty({bytes}, at::TensorOptions(at::kByte).pinned_memory(device.is_cuda()));
    std::memcpy(host.data_ptr(), bytes_.data(), bytes_.size());
    if (device.is_cpu()) return host;
    at::Tensor on_device = at::empty({bytes}, at::TensorOptions(device).dtype(at::kByte));
    on_device.copy_(host, /*non_blocking=*/true);
    return on_device;
  }

  size_t size() const { return bytes_.size(); }

 private:
  std::vector<char> bytes_;
};

// Where the tables of a bucket begin.
struct Places {
  size_t matrices, raw, tiles, p_factors, q_factors;
};

Places join(Joined& joined, const HostTables& tables) {
  return {joined.add(tables.matrices), joined.add(tables.raw), joined.add(tables.tiles.tiles),
          joined.add(tables.p_factors.factors), joined.add(tables.q_factors.factors)};
}

std::vector<kernels::RawSegment> raw_table(const BucketPlan& plan) {
  std::vector<kernels::RawSegment> table;
  for (const PlannedRaw& raw : plan.raw) {
    table.push_back({raw.gradient_offset, raw.numel, raw.p_offset});
  }
  return table;
}

// Without error feedback, nothing would keep what the products lose. Where factors travel in
// float32, a gradient of exact rank comes back exactly.
bool admits_bfloat16_products(const BucketSpec& spec) {
  return spec.options.use_error_feedback && spec.options.wire_dtype;
}

kernels::Bucket bucket_without_tables(const BucketSpec& spec, StepCounter* step_counter) {
  kernels::Bucket bucket{};
  bucket.p_numel = spec.plan.p_numel;
  bucket.q_numel = spec.plan.q_numel;
  bucket.skipped_steps = step_counter ? step_counter->on(spec.device) : nullptr;
  bucket.gradient_dtype = to_dtype(spec.gradient_type);
  bucket.residual_dtype = spec.options.residual_dtype;
  bucket.bfloat16_products = admits_bfloat16_products(spec);
  bucket.epsilon = spec.options.orthogonalization_epsilon;
  bucket.seed = static_cast<uint64_t>(spec.options.random_seed);
  return bucket;
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
    matrix.memory_units = state.memory_units.data_ptr<double>();
    matrix.q_norms = state.q_norms.data_ptr<double>();
  }
  return table;
}

HostTables host_tables(const BucketSpec& spec, std::vector<kernels::Matrix> matrices) {
  HostTables tables;
  tables.matrices = std::move(matrices);
  tables.raw = raw_table(spec.plan);
  tables.tiles = require_stages(spec.device.type()).make_tiles(tables.matrices, tables.raw);
  if (spec.options.wire_dtype) {
    const auto [p, q] = plan_payloads(spec);
    tables.p_factors =
        kernels::slice_of(kernels::p_packet_factors(tables.matrices), p.begin, p.end);
    tables.q_factors =
        kernels::slice_of(kernels::q_packet_factors(tables.matrices), q.begin, q.end);
  }
  return tables;
}

}  // namespace

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
    matrix.use_offset = planned.use_offset;
  }
  return table;
}

DeviceTables upload_tables(kernels::Bucket& bucket, const HostTables& tables, at::Device device) {
  Joined joined;
  const Places places = join(joined, tables);
  const at::Tensor memory = joined.upload(device);
  const auto* start = static_cast<const char*>(memory.data_ptr());
  bucket.matrices = reinterpret_cast<const kernels::Matrix*>(start + places.matrices);
  bucket.raw_segments = reinterpret_cast<const kernels::RawSegment*>(start + places.raw);
  bucket.tiles = reinterpret_cast<const kernels::Tile*>(start + places.tiles);
  bucket.num_matrices = static_cast<int32_t>(tables.matrices.size());
  bucket.num_raw_segments = static_cast<int32_t>(tables.raw.size());
  bucket.tile_list_begin = tables.tiles.list_begin;
  bucket.largest_rank = tables.tiles.largest_rank;
  return {memory, reinterpret_cast<const kernels::PacketFactor*>(start + places.p_factors),
          reinterpret_cast<const kernels::PacketFactor*>(start + places.q_factors),
          static_cast<int32_t>(tables.p_factors.factors.size()),
          static_cast<int32_t>(tables.q_factors.factors.size())};
}

BytesOfTables bytes_of_tables(const BucketSpec& spec) {
  const HostTables tables = host_tables(spec, matrices_without_states(spec.plan));
  Joined joined;
  join(joined, tables);
  return {static_cast<int64_t>(joined.size()) +
              tables.tiles.num_counters * static_cast<int64_t>(sizeof(uint64_t)) +
              static_cast<int64_t>(sizeof(kernels::BucketState)),
          static_cast<int64_t>(tables.tiles.workspace_bytes)};
}

BucketTables::BucketTables(const BucketSpec& spec, const std::vector<ParameterStatePtr>& states,
                           StepCounter* step_counter, const Workspaces& workspaces,
                           const Payloads& payloads)
    : bucket_(bucket_without_tables(spec, step_counter)), workspaces_(workspaces) {
  const HostTables tables = host_tables(spec, matrix_table(spec.plan, states));
  tables_ = upload_tables(bucket_, tables, spec.device);
  for (const auto& workspace : {workspaces_.first, workspaces_.second}) {
    workspace->reserve(static_cast<int64_t>(tables.tiles.workspace_bytes), spec.device);
  }
  const auto words = at::TensorOptions(spec.device).dtype(at::kLong);
  counters_ = at::zeros({tables.tiles.num_counters}, words);
  bucket_.counters = static_cast<uint64_t*>(counters_.data_ptr());
  static_assert(sizeof(kernels::BucketState) == 2 * sizeof(int64_t) &&
                offsetof(kernels::BucketState, skipped) == sizeof(int64_t));
  state_ = at::zeros({sizeof(kernels::BucketState) / sizeof(int64_t)}, words);
  bucket_.state = static_cast<kernels::BucketState*>(state_.data_ptr());
  bucket_.p_payload = payloads.p.data_ptr();
  bucket_.q_payload = payloads.q.data_ptr();
}

void BucketTables::put_uses(const BucketPlan& plan, const std::vector<Use>& uses) {
  bucket_.used = nullptr;
  if (uses.empty()) return;
  const at::Device device = state_.device();
  const auto count = static_cast<int64_t>(plan.matrices.size());
  const at::Tensor host =
      at::empty({count}, at::TensorOptions(at::kInt).pinned_memory(device.is_cuda()));
  for (int64_t i = 0; i < count; ++i) {
    const auto parameter = static_cast<size_t>(plan.matrices[static_cast<size_t>(i)].parameter);
    host.data_ptr<int32_t>()[i] = uses[parameter] == Use::kUsed ? 1 : 0;
  }
  if (!used_.defined()) used_ = at::empty({count}, at::TensorOptions(device).dtype(at::kInt));
  used_.copy_(host, /*non_blocking=*/true);
  bucket_.used = used_.data_ptr<int32_t>();
}

void BucketTables::begin_step(const BucketPlan& plan, const at::Tensor& gradient,
                              const StepInfo& step, bool is_captured) {
  put_uses(plan, step.uses);
  bucket_.workspace = workspaces_.first->data();
  if (is_captured) {
    workspaces_.first->captured();
    workspaces_.second->captured();
  }
  bucket_.gradient = gradient.data_ptr();
  bucket_.loss_scale = step.loss_scale.defined() ? step.loss_scale.data_ptr<float>() : nullptr;
  bucket_.units = step.units;
  bucket_.output_scale = step.output_scale;
  bucket_.step = is_captured ? kernels::kNextStep : step.step;
}

}  // namespace powersgd
