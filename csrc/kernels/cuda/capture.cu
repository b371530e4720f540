// SPDX-License-Identifier: BSD-3-Clause
#include <cuda_runtime.h>

#include "powersgd/kernels.h"

namespace powersgd::kernels::cuda {

bool is_capturing(Stream stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t error = cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status);
  // The legacy default stream cannot be captured. It refuses to answer while another stream is.
  if (error != cudaSuccess) cudaGetLastError();
  return error == cudaSuccess && status != cudaStreamCaptureStatusNone;
}

}  // namespace powersgd::kernels::cuda
