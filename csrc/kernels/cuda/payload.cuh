// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "kernels/cuda/elements.cuh"

// The payloads of a bucket.

namespace powersgd::kernels::cuda {

__device__ __forceinline__ float* p_payload(const Bucket& bucket) {
  return static_cast<float*>(bucket.p_payload);
}
__device__ __forceinline__ float* q_payload(const Bucket& bucket) {
  return static_cast<float*>(bucket.q_payload);
}

}  // namespace powersgd::kernels::cuda
