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

// True if every rank's gradient of the matrix is zero, by the reduced P payload.
__device__ __forceinline__ bool out_of_use(const Bucket& bucket, const Matrix& matrix) {
  return matrix.active_offset >= 0 &&
         load_any(bucket.p_payload, matrix.active_offset, bucket.factor_dtype) == 0;
}

}  // namespace powersgd::kernels::cuda
