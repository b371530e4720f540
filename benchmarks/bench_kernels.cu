// SPDX-License-Identifier: BSD-3-Clause
//
// Compares the time of the CUDA stages with the floor: the time for the bytes that no step can
// avoid, at copy speed.
//
//   build/gpu/bench_kernels --json kernels.json
//   build/gpu/bench_kernels --models gpt2 llama --ranks 4 16 --kinds float32 bfloat16
//   build/gpu/bench_kernels --ranks 16 32 --products float32 bfloat16
//
// It needs neither torch nor a network: buckets hold random gradients, and nothing is reduced. So
// many buckets take turns that none is in the cache from its last use. Times are medians between
// events around one stage of all buckets, divided by their number. The device spins while the host
// launches, so a busy host, such as one that compiles, changes no figure.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <vector>

#include "kernels/cases.h"
#include "kernels/device.cuh"
#include "kernels/record.h"
#include "powersgd/kernels/kernels.h"

namespace powersgd::bench {
namespace {

using namespace powersgd::kernels;

constexpr int kRepeats = 15;
constexpr int kWarmups = 3;

// Built as by BucketTables in csrc/compressor.
Bucket make_bucket(Pool& pool, const Case& measured, uint64_t seed) {
  const Layout& layout = *measured.layout;
  const Kind& kind = *measured.kind;
  std::vector<Matrix> matrices;
  Bucket bucket{};
  int64_t numel = layout.in_front;
  double* const units = pool.upload(std::vector<double>(layout.shapes.size(), 1.0));
  for (const Shape& shape : layout.shapes) {
    const int64_t r = std::min({measured.rank, shape.rows, shape.cols});
    Matrix m{shape.rows, shape.cols, r, numel, bucket.p_numel, bucket.q_numel};
    m.memory = pool.zeros(shape.rows * shape.cols * bytes_of(kind.residual));
    m.p_hat = pool.zeros(shape.rows * r * 4);
    m.q_local = pool.zeros(shape.cols * r * 4);
    m.q_warm = pool.zeros(shape.cols * r * 4);
    m.random_id = matrices.size();
    m.memory_units = units + matrices.size();
    m.q_norms = pool.zeros<double>(r * sizeof(double));
    matrices.push_back(m);
    numel += shape.rows * shape.cols;
    bucket.p_numel += shape.rows * r;
    bucket.q_numel += shape.cols * r;
  }
  std::vector<RawSegment> raw;
  if (layout.in_front > 0) raw.push_back({0, layout.in_front, bucket.p_numel});
  bucket.p_numel += layout.in_front;
  for (Matrix& m : matrices) m.use_offset = bucket.p_numel++;
  bucket.p_numel += 1;
  const TileTable table = cuda::make_tiles(matrices, raw);
  bucket.matrices = pool.upload(matrices);
  bucket.raw_segments = pool.upload(raw);
  bucket.tiles = pool.upload(table.tiles);
  bucket.num_matrices = static_cast<int32_t>(matrices.size());
  bucket.num_raw_segments = static_cast<int32_t>(raw.size());
  bucket.tile_list_begin = table.list_begin;
  bucket.largest_rank = table.largest_rank;
  bucket.gradient = pool.zeros(numel * bytes_of(kind.gradient));
  bucket.p_payload = pool.zeros(bucket.p_numel * 4);
  bucket.q_payload = pool.zeros(bucket.q_numel * 4);
  bucket.workspace = pool.zeros(table.workspace_bytes);
  bucket.counters = pool.zeros<uint64_t>(table.num_counters * sizeof(uint64_t));
  bucket.state = pool.zeros<BucketState>(sizeof(BucketState));
  bucket.skipped_steps = pool.zeros<StepCount>(sizeof(StepCount));
  bucket.gradient_dtype = kind.gradient;
  bucket.residual_dtype = kind.residual;
  bucket.bfloat16_products = measured.products->bfloat16;
  bucket.units = bucket.output_scale = 1;
  bucket.seed = seed;
  bucket.step = kNextStep;
  return bucket;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Milliseconds of each part of `work`, which takes the part's number.
std::vector<double> times(int parts, const std::function<void(int)>& prepare,
                          const std::function<void(int)>& run) {
  std::vector<cudaEvent_t> marks(parts + 1);
  for (cudaEvent_t& mark : marks) check(cudaEventCreate(&mark));
  std::vector<std::vector<double>> measured(parts);
  for (int i = 0; i < kWarmups + kRepeats; ++i) {
    prepare(i);
    spin<<<1, 1>>>();
    check(cudaEventRecord(marks[0]));
    for (int part = 0; part < parts; ++part) {
      run(part);
      check(cudaEventRecord(marks[part + 1]));
    }
    check(cudaEventSynchronize(marks[parts]));
    for (int part = 0; part < parts && i >= kWarmups; ++part) {
      float ms = 0;
      check(cudaEventElapsedTime(&ms, marks[part], marks[part + 1]));
      measured[part].push_back(ms);
    }
  }
  for (cudaEvent_t mark : marks) check(cudaEventDestroy(mark));
  std::vector<double> medians;
  for (const std::vector<double>& of_part : measured) medians.push_back(median(of_part));
  return medians;
}

double copy_bytes_per_ms() {
  constexpr size_t kBytes = size_t{2} << 30;
  Pool pool;
  void* const from = pool.zeros(kBytes);
  void* const to = pool.zeros(kBytes);
  const auto copy = [&](int) {
    check(cudaMemcpyAsync(to, from, kBytes, cudaMemcpyDeviceToDevice));
  };
  return 2.0 * kBytes / times(1, [](int) {}, copy)[0];
}

void fill(const Bucket& bucket, const Layout& layout, int directions, uint32_t seed) {
  int64_t offset = layout.in_front;
  for (const Shape& shape : layout.shapes) {
    const int64_t count = shape.rows * shape.cols;
    if (bucket.gradient_dtype == DType::kFloat32)
      fill_float<<<1024, 256>>>(static_cast<float*>(bucket.gradient) + offset, count, shape.cols,
                                directions, seed);
    else
      fill_bfloat16<<<1024, 256>>>(static_cast<uint16_t*>(bucket.gradient) + offset, count,
                                   shape.cols, directions, seed);
    check(cudaGetLastError());
    offset += count;
  }
}

Row measure(const Case& measured, double copy) {
  const Layout& layout = *measured.layout;
  const Kind& kind = *measured.kind;
  // At least 1 GB of gradients and memory in total.
  const int64_t numel = layout.numel();
  const int count = static_cast<int>(std::max<int64_t>(2, (int64_t{1} << 27) / numel));
  Pool pool;
  std::vector<Bucket> buckets;
  for (int i = 0; i < count; ++i) {
    buckets.push_back(make_bucket(pool, measured, 77 + i));
    check(cuda::random_start(buckets.back(), nullptr));
  }
  const auto refill = [&](int repeat) {
    const int directions = kind.deficient ? static_cast<int>(measured.rank / 2) : 0;
    for (int i = 0; i < count; ++i) fill(buckets[i], layout, directions, repeat * count + i);
  };
  using Stage = cuda::Status (*)(const Bucket&, cuda::Stream);
  const Stage stages[] = {cuda::project, cuda::orthogonalize, cuda::back_project,
                          cuda::reconstruct};
  const auto one_stage = [&](int stage) {
    for (const Bucket& bucket : buckets) check(stages[stage](bucket, nullptr));
  };
  const auto whole_step = [&](int) {
    for (const Bucket& bucket : buckets) {
      for (const Stage stage : stages) check(stage(bucket, nullptr));
    }
  };
  Row row{measured};
  const std::vector<double> by_stage = times(4, refill, one_stage);
  for (int stage = 0; stage < 4; ++stage) row.stage[stage] = by_stage[stage] / count;
  const int64_t before = cuda::launch_count();
  row.step = times(1, refill, whole_step)[0] / count;
  row.launches = static_cast<double>(cuda::launch_count() - before) / count / (kWarmups + kRepeats);
  row.floor = static_cast<double>(floor_bytes(numel, kind)) / copy;
  for (const Bucket& bucket : buckets) {
    BucketState state;
    check(cudaMemcpy(&state, bucket.state, sizeof(state), cudaMemcpyDeviceToHost));
    row.skipped += state.skipped != 0;
  }
  return row;
}

}  // namespace
}  // namespace powersgd::bench

int main(int count, char** words) {
  using namespace powersgd::bench;
  const Arguments arguments = Arguments::parse(count, words);
  const double copy = copy_bytes_per_ms();
  std::printf("copy: %.2f TB/s, read plus write. Times in microseconds per bucket.\n", copy / 1e9);
  print_headings();
  std::vector<Row> rows;
  for (const Kind& kind : kKinds) {
    if (!arguments.kinds.empty() && !arguments.kinds.count(kind.name)) continue;
    for (const Layout& layout : kLayouts) {
      if (!arguments.models.empty() && !arguments.models.count(layout.name)) continue;
      for (const int64_t rank : arguments.ranks.empty() ? kind.ranks : arguments.ranks) {
        if (kind.deficient && rank < 2) continue;
        for (const Products* products : arguments.products) {
          rows.push_back(measure({&layout, &kind, rank, products}, copy));
          print(rows.back());
          if (!arguments.json.empty()) write(arguments.json, copy, rows);
        }
      }
    }
  }
  return 0;
}
