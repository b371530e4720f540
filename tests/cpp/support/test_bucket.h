// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "powersgd/kernels.h"
#include "support/stage_runner.h"

namespace powersgd::test {

using Values = std::vector<double>;

// A part of a bucket: a matrix, or a raw segment if the rank is negative.
struct Part {
  int64_t rows;
  int64_t cols;
  int64_t rank;

  static Part raw(int64_t numel) { return {1, numel, -1}; }
  bool is_raw() const { return rank < 0; }
  int64_t numel() const { return rows * cols; }
};

struct BucketSpec {
  std::vector<Part> parts;
  DType gradient_dtype = DType::kFloat32;
  DType residual_dtype = DType::kFloat32;
  bool error_feedback = true;
  int64_t misalignment = 0;  // elements by which every array starts past an aligned address
  bool tells_use = false;    // the P payload says of each matrix whether it was used
  // project and back_project round what they multiply. Only the CUDA kernels do, at ranks 9 to 32.
  bool bfloat16_products = false;

  DType factor_dtype() const {
    return gradient_dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  }
  // Returns these values as project and back_project multiply them.
  Values operand(const Values& values) const;
};

// An array in device memory, read and written as doubles.
class DeviceArray {
 public:
  DeviceArray(StageRunner& runner, DType dtype, int64_t numel, int64_t misalignment);

  void* data() const { return data_; }
  void set(const Values& values);
  Values get() const;
  std::vector<uint8_t> bytes() const;

 private:
  StageRunner& runner_;
  DType dtype_;
  size_t bytes_;
  void* data_;
};

// The counts that buckets share, zero at first.
class SharedStepCounts {
 public:
  explicit SharedStepCounts(StageRunner& runner);

  kernels::StepCounts* data() const { return data_; }
  kernels::StepCounts get() const;

 private:
  StageRunner& runner_;
  kernels::StepCounts* data_;
};

struct DeviceMatrix {
  Part part;
  int64_t gradient_offset;
  int64_t p_offset;
  int64_t q_offset;
  int64_t use_offset;
  std::unique_ptr<DeviceArray> memory;  // null without error feedback
  std::unique_ptr<DeviceArray> p_hat, q_local, q_warm;
  std::unique_ptr<DeviceArray> memory_units;  // one element, 1 at first
  std::unique_ptr<DeviceArray> q_norms;       // [rank] in float64
};

struct DeviceRaw {
  int64_t gradient_offset;
  int64_t numel;
  int64_t p_offset;
};

// One bucket of one rank: all that the stages need, in the memory of a runner. Everything but the
// loss scales starts as zero. The numbers of `bucket` (scales, seed, step, epsilon) may be changed
// between stages.
class TestBucket {
 public:
  TestBucket(StageRunner& runner, const BucketSpec& spec);

  void run(Stage stage);

  // Values of one matrix or raw segment out of an array of the whole bucket, and back.
  static Values slice(const Values& values, int64_t offset, int64_t numel);
  Values gradient_of(const DeviceMatrix& matrix) const;
  Values p_of(const DeviceMatrix& matrix) const;
  Values q_of(const DeviceMatrix& matrix) const;

  // The elements of the P payload that say whether a matrix was used, by matrix.
  Values uses() const;
  void set_uses(const Values& values);
  // Says which matrices this rank has used, by matrix.
  void put_used(const std::vector<int32_t>& used);

  kernels::BucketState state() const;
  void set_skipped(bool skipped);
  // Makes this the number of the step in progress, as project does.
  void set_step(uint64_t step);
  // Makes the stages read the loss scale of the gradient from the device.
  void put_loss_scale(double scale);
  double count() const { return p_payload->get().back(); }

  // All the bytes that a step may write, for comparisons bit by bit.
  std::vector<uint8_t> state_bytes() const;

  const BucketSpec spec;
  kernels::Bucket bucket{};
  std::vector<DeviceMatrix> matrices;
  std::vector<DeviceRaw> raws;
  std::unique_ptr<DeviceArray> gradient, p_payload, q_payload;

 private:
  std::unique_ptr<DeviceArray> loss_scale_;  // null until put_loss_scale()
  void lay_out();
  std::unique_ptr<DeviceArray> make_array(DType dtype, int64_t numel);
  void build_tables();
  void set_state(const kernels::BucketState& state);
  template <class T>
  T* upload(const std::vector<T>& table);

  StageRunner& runner_;
};

// Reproducible numbers, about normally distributed.
Values random_values(int64_t count, uint64_t seed, double scale = 1);

std::string describe(const BucketSpec& spec);

}  // namespace powersgd::test
