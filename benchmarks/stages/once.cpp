// SPDX-License-Identifier: BSD-3-Clause
//
// One step of the CPU stages under callgrind, for bench_instructions.py. Nothing but the stages is
// counted, each dumped under its name; a step before it has touched all memory.
//
//   once DTYPE RANK <SHAPES     a line per tensor, its sizes; DDP's buckets apart by a blank
#include <valgrind/callgrind.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <new>
#include <sstream>
#include <string>
#include <vector>

#include "powersgd/kernels.h"
#include "powersgd/plan.h"

namespace {

using namespace powersgd;
using kernels::cpu::ParallelFor;

const ParallelFor kSerial = [](int64_t count, const auto& body) { body(0, count); };

void* allocate(int64_t bytes) {
  void* block = nullptr;
  if (posix_memalign(&block, 64, static_cast<size_t>(bytes) + 64) != 0) throw std::bad_alloc();
  std::fill_n(static_cast<char*>(block), bytes, char{0});
  return block;
}

// Does the work of BucketCompressor without torch. The process ends before anything is freed.
kernels::Bucket make_bucket(const BucketPlan& plan, DType gradient_type, DType residual_type) {
  auto* matrices = new std::vector<kernels::Matrix>;
  auto* raw = new std::vector<kernels::RawSegment>;
  for (const PlannedMatrix& planned : plan.matrices) {
    const auto [rows, cols] = planned.shape;
    kernels::Matrix matrix{};
    matrix.rows = rows;
    matrix.cols = cols;
    matrix.rank = planned.rank;
    matrix.gradient_offset = planned.gradient_offset;
    matrix.p_offset = planned.p_offset;
    matrix.q_offset = planned.q_offset;
    matrix.use_offset = planned.use_offset;
    matrix.memory = allocate(rows * cols * size_of(residual_type));
    matrix.p_hat = allocate(rows * planned.rank * 4);
    matrix.q_local = allocate(planned.rank * cols * 4);
    matrix.q_warm = allocate(planned.rank * cols * 4);
    matrix.random_id = matrices->size();
    matrix.memory_units = new double(1);
    matrices->push_back(matrix);
  }
  for (const PlannedRaw& planned : plan.raw) {
    raw->push_back({planned.gradient_offset, planned.numel, planned.p_offset});
  }
  auto* tiles = new kernels::TileTable(kernels::cpu::make_tiles(*matrices, *raw, DType::kFloat32));
  kernels::Bucket bucket{};
  bucket.matrices = matrices->data();
  bucket.raw_segments = raw->data();
  bucket.tiles = tiles->tiles.data();
  bucket.num_matrices = static_cast<int32_t>(matrices->size());
  bucket.num_raw_segments = static_cast<int32_t>(raw->size());
  bucket.tile_list_begin = tiles->list_begin;
  bucket.largest_rank = tiles->largest_rank;
  bucket.gradient = allocate(plan.gradient_numel * size_of(gradient_type));
  bucket.p_payload = allocate(plan.p_numel * 4);
  bucket.q_payload = allocate(plan.q_numel * 4);
  bucket.p_numel = plan.p_numel;
  bucket.q_numel = plan.q_numel;
  bucket.workspace = allocate(static_cast<int64_t>(tiles->workspace_bytes));
  bucket.state = static_cast<kernels::BucketState*>(allocate(sizeof(kernels::BucketState)));
  bucket.gradient_dtype = gradient_type;
  bucket.residual_dtype = residual_type;
  bucket.factor_dtype = DType::kFloat32;
  bucket.units = bucket.output_scale = 1;
  kernels::cpu::random_start(bucket, kSerial);
  return bucket;
}

// Numbers that are all different and of either sign.
void fill_gradient(const kernels::Bucket& bucket, int64_t numel) {
  uint32_t state = 1;
  for (int64_t i = 0; i < numel; ++i) {
    state = state * 1664525 + 1013904223;
    const float value = static_cast<float>(static_cast<int32_t>(state)) * 0x1p-31f;
    if (bucket.gradient_dtype == DType::kFloat32) {
      static_cast<float*>(bucket.gradient)[i] = value;
    } else {  // bfloat16: the upper half of a float32
      uint32_t bits;
      std::memcpy(&bits, &value, sizeof(bits));
      static_cast<uint16_t*>(bucket.gradient)[i] = static_cast<uint16_t>(bits >> 16);
    }
  }
}

using StageFunction = void (*)(const kernels::Bucket&, const ParallelFor&);

void count(const char* name, StageFunction stage, const kernels::Bucket& bucket) {
  CALLGRIND_TOGGLE_COLLECT;
  stage(bucket, kSerial);
  CALLGRIND_TOGGLE_COLLECT;
  CALLGRIND_DUMP_STATS_AT(name);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const DType dtype = parse_dtype(argv[1]);
  Options options;
  options.matrix_approximation_rank = std::stol(argv[2]);
  options.wire_dtype.reset();
  std::vector<std::vector<ParameterShape>> buckets(1);
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    ParameterShape shape;
    for (int64_t size; words >> size;) shape.sizes.push_back(size);
    if (shape.sizes.empty()) {
      buckets.emplace_back();
    } else {
      buckets.back().push_back(shape);
    }
  }
  for (const auto& shapes : buckets) {
    const BucketPlan plan = plan_bucket(shapes, options);
    kernels::Bucket bucket = make_bucket(plan, dtype, DType::kFloat32);
    for (int step = 0; step < 2; ++step) {
      fill_gradient(bucket, plan.gradient_numel);
      bucket.step = static_cast<uint64_t>(step);
      if (step == 0) {
        kernels::cpu::project(bucket, kSerial);
        kernels::cpu::orthogonalize(bucket, kSerial);
        kernels::cpu::back_project(bucket, kSerial);
        kernels::cpu::reconstruct(bucket, kSerial);
      } else {
        count("project", kernels::cpu::project, bucket);
        count("orthogonalize", kernels::cpu::orthogonalize, bucket);
        count("back_project", kernels::cpu::back_project, bucket);
        count("reconstruct", kernels::cpu::reconstruct, bucket);
      }
    }
  }
}
