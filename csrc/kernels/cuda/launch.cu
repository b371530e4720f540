// SPDX-License-Identifier: BSD-3-Clause
//
// The questions about launches that host code without CUDA's headers asks.
#include "kernels/cuda/launch.cuh"

namespace powersgd::kernels::cuda {

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
