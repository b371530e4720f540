// SPDX-License-Identifier: BSD-3-Clause
#include <cuda_runtime.h>

#include "powersgd/kernels.h"

namespace powersgd::kernels::cuda {

const char* error_name(Status status) {
  cudaGetLastError();
  return cudaGetErrorName(static_cast<cudaError_t>(status));
}

}  // namespace powersgd::kernels::cuda
