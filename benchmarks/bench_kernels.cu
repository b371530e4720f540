// SPDX-License-Identifier: BSD-3-Clause
//
// How close do the CUDA stages come to the floor, five passes over the gradient at copy speed?
//
//   nvcc -std=c++17 -O3 -arch=sm_90 -Iinclude -Icsrc benchmarks/bench_kernels.cu
//        csrc/kernels/cuda/*.cu csrc/kernels/cuda/tiles.cpp -o bench_kernels && ./bench_kernels
//
// No torch and no network: buckets of random gradients, the reductions left out. Buckets are used
// in turn, so many that none is in the cache from the last time. Times are medians, by events
// around one stage of all buckets, divided by their number.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "powersgd/kernels.h"

namespace {

using namespace powersgd;
using namespace powersgd::kernels;

void check(int status) {
  if (status == 0) return;
  std::fprintf(stderr, "%s\n", cudaGetErrorString(static_cast<cudaError_t>(status)));
  std::exit(1);
}

template <typename T = void>
T* allocate(size_t bytes) {
  void* memory = nullptr;
  check(cudaMalloc(&memory, std::max<size_t>(bytes, 1)));
  check(cudaMemset(memory, 0, bytes));
  return static_cast<T*>(memory);
}

template <typename T>
const T* upload(const std::vector<T>& table) {
  T* memory = allocate<T>(table.size() * sizeof(T));
  check(cudaMemcpy(memory, table.data(), table.size() * sizeof(T), cudaMemcpyHostToDevice));
  return memory;
}

// Uniform in [-1, 1), by a hash of the index.
__global__ void fill_float(float* out, int64_t count, uint32_t seed) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    uint32_t x = static_cast<uint32_t>(i) * 2654435761u + seed;
    x = (x ^ x >> 15) * 2246822519u;
    x = (x ^ x >> 13) * 3266489917u;
    out[i] = static_cast<float>(static_cast<int32_t>(x ^ x >> 16)) * 0x1p-31f;
  }
}
// Random bfloat16 of magnitude 0.5 to 1: the hash's bits under a fixed exponent.
__global__ void fill_bfloat16(uint16_t* out, int64_t count, uint32_t seed) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    uint32_t x = (static_cast<uint32_t>(i) + seed) * 2654435761u;
    x = (x ^ x >> 15) * 2246822519u;
    out[i] = static_cast<uint16_t>((x >> 16 & 0x807F) | 0x3F00);
  }
}

struct Shape {
  int64_t rows, cols;
};

struct Layout {
  std::string name;
  std::vector<Shape> shapes;
};

Bucket make_bucket(const Layout& layout, int64_t rank, DType dtype, uint32_t seed) {
  std::vector<Matrix> matrices;
  Bucket bucket{};
  int64_t numel = 0;
  for (const Shape& shape : layout.shapes) {
    const int64_t r = std::min({rank, shape.rows, shape.cols});
    matrices.push_back({shape.rows, shape.cols, r, numel, bucket.p_numel, bucket.q_numel,
                        allocate(shape.rows * shape.cols * 4), allocate(shape.rows * r * 4),
                        allocate(shape.cols * r * 4), allocate(shape.cols * r * 4), matrices.size(),
                        -1, allocate<double>(sizeof(double))});
    numel += shape.rows * shape.cols;
    bucket.p_numel += shape.rows * r;
    bucket.q_numel += shape.cols * r;
  }
  bucket.p_numel += 1;
  const TileTable table = cuda::make_tiles(matrices, {}, DType::kFloat32, DType::kFloat32);
  bucket.matrices = upload(matrices);
  bucket.raw_segments = nullptr;
  bucket.tiles = upload(table.tiles);
  bucket.num_matrices = static_cast<int32_t>(matrices.size());
  bucket.tile_list_begin = table.list_begin;
  bucket.largest_rank = table.largest_rank;
  bucket.gradient = allocate(numel * (dtype == DType::kFloat32 ? 4 : 2));
  bucket.p_payload = allocate(bucket.p_numel * 4);
  bucket.q_payload = allocate(bucket.q_numel * 4);
  bucket.workspace = allocate(table.workspace_bytes);
  bucket.counters = allocate<uint64_t>(table.num_counters * sizeof(uint64_t));
  bucket.state = allocate<BucketState>(sizeof(BucketState));
  bucket.gradient_dtype = dtype;
  bucket.residual_dtype = bucket.factor_dtype = bucket.wire_dtype = DType::kFloat32;
  bucket.grad_scale = bucket.output_scale = 1;
  bucket.seed = seed;
  if (dtype == DType::kFloat32)
    fill_float<<<1024, 256>>>(static_cast<float*>(bucket.gradient), numel, seed);
  else
    fill_bfloat16<<<1024, 256>>>(static_cast<uint16_t*>(bucket.gradient), numel, seed);
  check(cudaGetLastError());
  return bucket;
}

double median_ms(int repeats, const std::function<void()>& run) {
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin));
  check(cudaEventCreate(&end));
  std::vector<float> times;
  for (int i = 0; i < repeats + 3; ++i) {
    float ms = 0;
    check(cudaEventRecord(begin));
    run();
    check(cudaEventRecord(end));
    check(cudaEventSynchronize(end));
    check(cudaEventElapsedTime(&ms, begin, end));
    if (i >= 3) times.push_back(ms);
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

double copy_bytes_per_ms() {
  constexpr size_t kBytes = size_t{2} << 30;
  void* from = allocate(kBytes);
  void* to = allocate(kBytes);
  const double ms =
      median_ms(20, [&] { check(cudaMemcpyAsync(to, from, kBytes, cudaMemcpyDeviceToDevice)); });
  check(cudaFree(from));
  check(cudaFree(to));
  return 2.0 * kBytes / ms;
}

void measure(const Layout& layout, int64_t rank, DType dtype, double copy) {
  int64_t numel = 0;
  for (const Shape& shape : layout.shapes) numel += shape.rows * shape.cols;
  // At least 1 GB of gradient and memory in all.
  const int count = static_cast<int>(std::max<int64_t>(2, (int64_t{1} << 27) / numel));
  std::vector<Bucket> buckets;
  for (int i = 0; i < count; ++i) buckets.push_back(make_bucket(layout, rank, dtype, 77 + i));
  const auto all = [&](cuda::Status (*stage)(const Bucket&, cuda::Stream)) {
    return [&buckets, stage] {
      for (const Bucket& bucket : buckets) check(stage(bucket, nullptr));
    };
  };
  all(cuda::random_start)();
  const double start[] = {median_ms(15, all(cuda::project)) / count,
                          median_ms(15, all(cuda::orthogonalize)) / count,
                          median_ms(15, all(cuda::back_project)) / count};
  // The gradient is overwritten from here on, with numbers as good as any.
  const double reconstruct = median_ms(15, all(cuda::reconstruct)) / count;
  const double step = median_ms(15,
                                [&] {
                                  for (const Bucket& bucket : buckets) {
                                    check(cuda::project(bucket, nullptr));
                                    check(cuda::orthogonalize(bucket, nullptr));
                                    check(cuda::back_project(bucket, nullptr));
                                    check(cuda::reconstruct(bucket, nullptr));
                                  }
                                }) /
                      count;
  const double element = dtype == DType::kFloat32 ? 4 : 2;
  // G is read and written, memory read twice and written once.
  const double floor = numel * (2 * element + 3 * 4) / copy;
  std::printf("%-22s %4ld %-9s %8.1f %8.1f %8.1f %8.1f %9.1f %9.1f %7.2f\n", layout.name.c_str(),
              static_cast<long>(rank), dtype == DType::kFloat32 ? "float32" : "bfloat16",
              start[0] * 1e3, start[1] * 1e3, start[2] * 1e3, reconstruct * 1e3, step * 1e3,
              floor * 1e3, step / floor);
  std::fflush(stdout);
  for (const Bucket& bucket : buckets) {
    std::vector<Matrix> matrices(bucket.num_matrices);
    check(cudaMemcpy(matrices.data(), bucket.matrices, matrices.size() * sizeof(Matrix),
                     cudaMemcpyDeviceToHost));
    for (const Matrix& m : matrices) {
      for (void* memory :
           {m.memory, m.p_hat, m.q_local, m.q_warm, static_cast<void*>(m.grad_scale)})
        check(cudaFree(memory));
    }
    for (const void* memory :
         {static_cast<const void*>(bucket.matrices), static_cast<const void*>(bucket.tiles),
          static_cast<const void*>(bucket.gradient), static_cast<const void*>(bucket.p_payload),
          static_cast<const void*>(bucket.q_payload), static_cast<const void*>(bucket.workspace),
          static_cast<const void*>(bucket.counters), static_cast<const void*>(bucket.state)})
      check(cudaFree(const_cast<void*>(memory)));
  }
}

}  // namespace

int main() {
  const double copy = copy_bytes_per_ms();
  std::printf("copy: %.2f TB/s, read and written. Times in microseconds per bucket.\n", copy / 1e9);
  std::printf("%-22s %4s %-9s %8s %8s %8s %8s %9s %9s %7s\n", "bucket", "rank", "gradient",
              "project", "orthog.", "back", "reconst.", "step", "floor", "ratio");
  const std::vector<Layout> layouts = {
      {"25 MB square", std::vector<Shape>(6, {1024, 1024})},
      {"25 MB GPT-2", {{3072, 768}, {768, 3072}, {2304, 768}, {768, 768}}},
      {"25 MB ResNet-50", {{512, 4608}, {2048, 512}, {512, 2048}, {1000, 2048}}},
      {"GPT-2 embedding", {{50257, 768}}},
      {"Llama-7B layer", {{4096, 4096}, {4096, 4096}, {11008, 4096}, {4096, 11008}}},
  };
  for (const Layout& layout : layouts) {
    for (const int64_t rank : {1, 2, 4, 8, 16, 32}) measure(layout, rank, DType::kFloat32, copy);
    measure(layout, 4, DType::kBFloat16, copy);
  }
  return 0;
}
