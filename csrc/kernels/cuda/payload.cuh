// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "kernels/cuda/elements.cuh"

// The payloads of a bucket, in the factor dtype.

namespace powersgd::kernels::cuda {

template <typename F>
__device__ __forceinline__ F* p_payload(const Bucket& bucket) {
  return static_cast<F*>(bucket.p_payload);
}
template <typename F>
__device__ __forceinline__ F* q_payload(const Bucket& bucket) {
  return static_cast<F*>(bucket.q_payload);
}

}  // namespace powersgd::kernels::cuda
