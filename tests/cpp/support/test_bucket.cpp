// SPDX-License-Identifier: BSD-3-Clause
#include "support/test_bucket.h"

#include <random>

#include "support/dtypes.h"

namespace powersgd::test {

DeviceArray::DeviceArray(StageRunner& runner, DType dtype, int64_t numel, int64_t misalignment)
    : runner_(runner), dtype_(dtype), bytes_(static_cast<size_t>(numel * size_of(dtype))) {
  const auto skipped = static_cast<size_t>(misalignment * size_of(dtype));
  data_ = static_cast<char*>(runner.allocate(bytes_ + skipped)) + skipped;
  set(Values(static_cast<size_t>(numel), 0.0));
}

void DeviceArray::set(const Values& values) {
  const std::vector<uint8_t> encoded = encode(dtype_, values);
  if (encoded.size() != bytes_) throw std::invalid_argument("wrong number of values");
  runner_.copy_in(data_, encoded.data(), bytes_);
}

std::vector<uint8_t> DeviceArray::bytes() const {
  std::vector<uint8_t> bytes(bytes_);
  runner_.copy_out(bytes.data(), data_, bytes_);
  return bytes;
}

Values DeviceArray::get() const { return decode(dtype_, bytes()); }

SharedStepCounts::SharedStepCounts(StageRunner& runner)
    : runner_(runner),
      data_(static_cast<kernels::StepCounts*>(runner.allocate(sizeof(kernels::StepCounts)))) {
  const kernels::StepCounts none{};
  runner_.copy_in(data_, &none, sizeof(none));
}

kernels::StepCounts SharedStepCounts::get() const {
  kernels::StepCounts counts;
  runner_.copy_out(&counts, data_, sizeof(counts));
  return counts;
}

TestBucket::TestBucket(StageRunner& runner, const BucketSpec& bucket_spec)
    : spec(bucket_spec), runner_(runner) {
  lay_out();
  build_tables();
}

void TestBucket::lay_out() {
  const DType factor = spec.factor_dtype();
  const auto array = [&](DType dtype, int64_t numel) { return make_array(dtype, numel); };
  int64_t gradient_numel = 0;
  for (const Part& part : spec.parts) {
    if (part.is_raw()) {
      raws.push_back({gradient_numel, part.numel(), 0});
    } else {
      matrices.push_back({part, gradient_numel, bucket.p_numel, bucket.q_numel, -1,
                          spec.error_feedback ? array(spec.residual_dtype, part.numel()) : nullptr,
                          array(factor, part.rows * part.rank),
                          array(factor, part.cols * part.rank),
                          array(factor, part.cols * part.rank),
                          std::make_unique<DeviceArray>(runner_, DType::kFloat64, 1, 0),
                          std::make_unique<DeviceArray>(runner_, DType::kFloat64, part.rank, 0)});
      matrices.back().memory_units->set({1});
      bucket.p_numel += part.rows * part.rank;
      bucket.q_numel += part.cols * part.rank;
    }
    gradient_numel += part.numel();
  }
  for (DeviceRaw& raw : raws) {
    raw.p_offset = bucket.p_numel;
    bucket.p_numel += raw.numel;
  }
  for (DeviceMatrix& matrix : matrices) {
    if (spec.tells_use) matrix.use_offset = bucket.p_numel++;
  }
  bucket.p_numel += 1;
  gradient = array(spec.gradient_dtype, gradient_numel);
  p_payload = array(factor, bucket.p_numel);
  q_payload = array(factor, bucket.q_numel);
}

std::unique_ptr<DeviceArray> TestBucket::make_array(DType dtype, int64_t numel) {
  return std::make_unique<DeviceArray>(runner_, dtype, numel, spec.misalignment);
}

void TestBucket::build_tables() {
  std::vector<kernels::Matrix> matrix_table;
  for (const DeviceMatrix& matrix : matrices) {
    const Part& part = matrix.part;
    matrix_table.push_back(
        {part.rows, part.cols, part.rank, matrix.gradient_offset, matrix.p_offset, matrix.q_offset,
         matrix.memory ? matrix.memory->data() : nullptr, matrix.p_hat->data(),
         matrix.q_local->data(), matrix.q_warm->data(), 100 + matrix_table.size(),
         matrix.use_offset, static_cast<double*>(matrix.memory_units->data()),
         static_cast<double*>(matrix.q_norms->data())});
  }
  std::vector<kernels::RawSegment> raw_table;
  for (const DeviceRaw& raw : raws) {
    raw_table.push_back({raw.gradient_offset, raw.numel, raw.p_offset});
  }
  const kernels::TileTable tiles = runner_.make_tiles(matrix_table, raw_table, spec.factor_dtype());

  bucket.matrices = upload(matrix_table);
  bucket.raw_segments = upload(raw_table);
  bucket.tiles = upload(tiles.tiles);
  bucket.num_matrices = static_cast<int32_t>(matrix_table.size());
  bucket.num_raw_segments = static_cast<int32_t>(raw_table.size());
  bucket.tile_list_begin = tiles.list_begin;
  bucket.largest_rank = tiles.largest_rank;
  bucket.gradient = gradient->data();
  bucket.workspace = runner_.allocate(tiles.workspace_bytes);
  bucket.counters = upload(std::vector<uint64_t>(static_cast<size_t>(tiles.num_counters), 0));
  bucket.state = upload(std::vector<kernels::BucketState>{{}});
  bucket.gradient_dtype = spec.gradient_dtype;
  bucket.residual_dtype =
      spec.gradient_dtype == DType::kFloat64 ? DType::kFloat64 : spec.residual_dtype;
  bucket.factor_dtype = spec.factor_dtype();
  bucket.bfloat16_products = spec.bfloat16_products;
  bucket.p_payload = p_payload->data();
  bucket.q_payload = q_payload->data();
  bucket.units = bucket.output_scale = 1;
  bucket.seed = 42;
}

template <class T>
T* TestBucket::upload(const std::vector<T>& table) {
  void* data = runner_.allocate(table.size() * sizeof(T));
  runner_.copy_in(data, table.data(), table.size() * sizeof(T));
  return static_cast<T*>(data);
}

void TestBucket::run(Stage stage) { runner_.run(stage, bucket); }

Values TestBucket::slice(const Values& values, int64_t offset, int64_t numel) {
  return Values(values.begin() + offset, values.begin() + offset + numel);
}

Values TestBucket::gradient_of(const DeviceMatrix& matrix) const {
  return slice(gradient->get(), matrix.gradient_offset, matrix.part.numel());
}

Values TestBucket::p_of(const DeviceMatrix& matrix) const {
  return slice(p_payload->get(), matrix.p_offset, matrix.part.rows * matrix.part.rank);
}

Values TestBucket::q_of(const DeviceMatrix& matrix) const {
  return slice(q_payload->get(), matrix.q_offset, matrix.part.cols * matrix.part.rank);
}

Values TestBucket::uses() const {
  const Values payload = p_payload->get();
  Values result;
  for (const DeviceMatrix& matrix : matrices) {
    result.push_back(payload[static_cast<size_t>(matrix.use_offset)]);
  }
  return result;
}

void TestBucket::set_uses(const Values& values) {
  Values payload = p_payload->get();
  for (size_t i = 0; i < matrices.size(); ++i) {
    payload[static_cast<size_t>(matrices[i].use_offset)] = values[i];
  }
  p_payload->set(payload);
}

void TestBucket::put_used(const std::vector<int32_t>& used) { bucket.used = upload(used); }

kernels::BucketState TestBucket::state() const {
  kernels::BucketState state;
  runner_.copy_out(&state, bucket.state, sizeof(state));
  return state;
}

void TestBucket::set_state(const kernels::BucketState& state) {
  runner_.copy_in(bucket.state, &state, sizeof(state));
}

void TestBucket::set_skipped(bool skipped) {
  kernels::BucketState changed = state();
  changed.skipped = skipped ? 1 : 0;
  set_state(changed);
}

void TestBucket::set_step(uint64_t step) {
  kernels::BucketState changed = state();
  changed.step = step;
  set_state(changed);
  bucket.step = step;
}

void TestBucket::put_loss_scale(double scale) {
  if (!loss_scale_) loss_scale_ = std::make_unique<DeviceArray>(runner_, DType::kFloat32, 1, 0);
  loss_scale_->set({scale});
  bucket.loss_scale = static_cast<const float*>(loss_scale_->data());
}

std::vector<uint8_t> TestBucket::state_bytes() const {
  std::vector<uint8_t> all;
  const auto append = [&](const DeviceArray* array) {
    if (array == nullptr) return;
    const std::vector<uint8_t> bytes = array->bytes();
    all.insert(all.end(), bytes.begin(), bytes.end());
  };
  for (const DeviceArray* array : {gradient.get(), p_payload.get(), q_payload.get()}) {
    append(array);
  }
  for (const DeviceMatrix& matrix : matrices) {
    for (const DeviceArray* array :
         {matrix.memory.get(), matrix.p_hat.get(), matrix.q_local.get(), matrix.q_warm.get(),
          matrix.memory_units.get(), matrix.q_norms.get()}) {
      append(array);
    }
  }
  return all;
}

Values random_values(int64_t count, uint64_t seed, double scale) {
  std::mt19937_64 generator(seed);
  std::normal_distribution<double> normal(0, scale);
  Values values(static_cast<size_t>(count));
  for (double& value : values) value = normal(generator);
  return values;
}

Values BucketSpec::operand(const Values& values) const {
  return bfloat16_products ? decode(DType::kBFloat16, encode(DType::kBFloat16, values)) : values;
}

std::string describe(const BucketSpec& spec) {
  std::string text = to_string(spec.gradient_dtype) + "_" + to_string(spec.residual_dtype);
  if (spec.bfloat16_products) text += "_bfloat16_products";
  for (const Part& part : spec.parts) {
    text += part.is_raw() ? "_raw" + std::to_string(part.cols)
                          : "_" + std::to_string(part.rows) + "x" + std::to_string(part.cols) +
                                "r" + std::to_string(part.rank);
  }
  return text;
}

}  // namespace powersgd::test
