// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "cases.h"

// Memory, errors and gradients for bench_kernels.cu.
namespace powersgd::bench {

inline void check(int status) {
  const cudaError_t error = static_cast<cudaError_t>(status);
  if (error == cudaSuccess) return;
  fail(std::string(cudaGetErrorName(error)) + ": " + cudaGetErrorString(error));
}

// Device memory, freed at the end of the scope.
class Pool {
 public:
  ~Pool() {
    for (void* memory : allocated_) check(cudaFree(memory));
  }
  template <typename T = void>
  T* zeros(size_t bytes) {
    void* memory = nullptr;
    check(cudaMalloc(&memory, std::max<size_t>(bytes, 1)));
    allocated_.push_back(memory);
    check(cudaMemset(memory, 0, bytes));
    return static_cast<T*>(memory);
  }
  template <typename T>
  T* upload(const std::vector<T>& table) {
    T* memory = zeros<T>(table.size() * sizeof(T));
    check(cudaMemcpy(memory, table.data(), table.size() * sizeof(T), cudaMemcpyHostToDevice));
    return memory;
  }

 private:
  std::vector<void*> allocated_;
};

constexpr int64_t kSpinNanoseconds = 4'000'000;

// Spins while the host launches the kernels of all buckets.
__global__ void spin() {
  int64_t start, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - start < kSpinNanoseconds);
}

__device__ uint32_t hash(uint32_t x) {
  x = (x ^ x >> 15) * 2246822519u;
  x = (x ^ x >> 13) * 3266489917u;
  return x ^ x >> 16;
}

// Element i of a gradient, of magnitude 0.5 to 1. With `directions`, each row is one of that
// many vectors times a power of two. This is exact, so the rank is exactly `directions`.
__device__ float element(int64_t i, int64_t cols, int directions, uint32_t seed) {
  float scale = 1;
  if (directions > 0) {
    const uint32_t row = static_cast<uint32_t>(i / cols);
    scale = __int_as_float(static_cast<int>(124 + hash(row + seed) % 4) << 23);
    i = hash(row) % static_cast<uint32_t>(directions) * cols + i % cols;
  }
  const uint32_t bits = hash(static_cast<uint32_t>(i) * 2654435761u + seed);
  return scale * __int_as_float(static_cast<int>((bits & 0x807F0000u) | 0x3F000000u));
}

__global__ void fill_float(float* out, int64_t count, int64_t cols, int directions, uint32_t seed) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x)
    out[i] = element(i, cols, directions, seed);
}
// The elements have bfloat16's 7 bits, so the upper half of a float is the bfloat16.
__global__ void fill_bfloat16(uint16_t* out, int64_t count, int64_t cols, int directions,
                              uint32_t seed) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x)
    out[i] = static_cast<uint16_t>(__float_as_int(element(i, cols, directions, seed)) >> 16);
}

}  // namespace powersgd::bench
