// SPDX-License-Identifier: BSD-3-Clause
//
// What is decided once for all launches, and what host code without CUDA's headers asks.
#include "kernels/cuda/launch.cuh"

#include <array>

namespace powersgd::kernels::cuda {
namespace {

// All kernels are compiled for the same architectures, so one answers for all.
__global__ void any_kernel() {}

}  // namespace

Status find_code_version(int* version) {
  static std::array<std::atomic<int>, 64> known{};
  int device = 0;
  if (const cudaError_t status = cudaGetDevice(&device); status != cudaSuccess) return status;
  std::atomic<int>& answer = known[static_cast<size_t>(device) % known.size()];
  if (answer == 0) {
    cudaFuncAttributes attributes{};
    const cudaError_t status =
        cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(any_kernel));
    if (status != cudaSuccess) return status;
    answer = attributes.ptxVersion;
  }
  *version = answer;
  return cudaSuccess;
}

int64_t launch_count() { return launches; }

bool is_capturing(Stream stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t error = cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status);
  // The legacy default stream cannot be captured. It refuses to answer while another stream is.
  if (error != cudaSuccess) cudaGetLastError();
  return error == cudaSuccess && status != cudaStreamCaptureStatusNone;
}

const char* error_name(Status status) {
  cudaGetLastError();
  return cudaGetErrorName(static_cast<cudaError_t>(status));
}

}  // namespace powersgd::kernels::cuda
