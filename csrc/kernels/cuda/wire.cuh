// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "kernels/cuda/elements.cuh"
#include "kernels/cuda/grid.cuh"
#include "kernels/cuda/reduce.cuh"
#include "kernels/shared/wire.h"

// Elements of a payload, in the dtype of the wire. A float16 payload is multiplied by a power of
// two. bfloat16 has the range of float, and needs no scale.

namespace powersgd::kernels::cuda {

// One payload of a bucket in the midst of a step.
template <typename F>
struct Payload {
  void* data;
  DType dtype;
  bool rounds;
  F scale, inverse_scale;  // powers of two

  __device__ Payload(void* payload, const Bucket& bucket, float known_scale)
      : data(payload),
        dtype(bucket.wire_dtype),
        rounds(wire_rounds(bucket)),
        scale(static_cast<F>(wire_scale(bucket, known_scale))),
        inverse_scale(1 / scale) {}

  __device__ __forceinline__ F load(int64_t index) const {
    if (!rounds) return static_cast<const F*>(data)[index];
    if constexpr (sizeof(F) == 8)
      return inverse_scale * load_any(data, index, dtype);
    else
      return inverse_scale * widen(static_cast<const uint16_t*>(data)[index], dtype);
  }
  // Returns the value that is sent.
  __device__ __forceinline__ F store(int64_t index, F value) const {
    if (!rounds) return static_cast<F*>(data)[index] = value;
    if constexpr (sizeof(F) == 8) {
      store_any(data, index, scale * value, dtype);
      return load(index);
    } else {
      const uint16_t sent = narrow<uint16_t>(scale * value, dtype);
      static_cast<uint16_t*>(data)[index] = sent;
      return inverse_scale * widen(sent, dtype);
    }
  }
  // A count is not scaled.
  __device__ void store_count(int64_t index, bool value) const {
    store_any(data, index, value ? 1 : 0, dtype);
  }
  __device__ bool has_count(int64_t index) const { return !(load_any(data, index, dtype) == 0); }
};

// The P payload that project sends.
template <typename F>
__device__ __forceinline__ Payload<F> p_to_send(const Bucket& bucket) {
  return {bucket.p_payload, bucket, bucket.state->p_scale.next};
}
// The sum that has come back.
template <typename F>
__device__ __forceinline__ Payload<F> reduced_p(const Bucket& bucket) {
  return {bucket.p_payload, bucket, bucket.state->p_scale.current};
}
// The Q payload, from the end of orthogonalize on.
template <typename F>
__device__ __forceinline__ Payload<F> q_of(const Bucket& bucket) {
  return {bucket.q_payload, bucket, bucket.state->q_scale.current};
}

// True if every rank's gradient of the matrix is zero, by the reduced P payload.
__device__ __forceinline__ bool out_of_use(const Bucket& bucket, const Matrix& matrix) {
  return matrix.active_offset >= 0 &&
         load_any(bucket.p_payload, matrix.active_offset, bucket.wire_dtype) == 0;
}

// A power of two stays one, and no other value becomes one, whose scale would be another.
__device__ __forceinline__ float round_down(float value) { return value; }
__device__ __forceinline__ float round_down(double value) { return __double2float_rz(value); }

// Keeps the largest magnitude of the values seen, infinity if one is not finite. Returns whether
// this one is.
template <typename F>
__device__ __forceinline__ bool examine(F value, F* largest) {
  const bool finite = is_finite(value);
  const F magnitude = finite ? fabs(value) : static_cast<F>(INFINITY);
  if (magnitude > *largest) *largest = magnitude;
  return finite;
}

// Notes the largest magnitude that the threads of a block have seen, for one launch. All threads
// call it. The counter holds the number of the launch and the bits of a float, which grow with it.
template <typename F>
__device__ void note_largest(uint64_t* counter, uint64_t launch, F largest) {
  float value = round_down(largest);
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2)
    value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, distance));
  if (threadIdx.x % kWarpSize == 0)
    raise_to(counter, (launch + 1) << 32 | static_cast<uint64_t>(float_bits(value)));
}

// 0 if nothing was noted in this launch.
__device__ inline float noted_largest(uint64_t noted, uint64_t launch) {
  return static_cast<uint32_t>(noted >> 32) == static_cast<uint32_t>(launch + 1)
             ? __uint_as_float(static_cast<uint32_t>(noted))
             : 0.0f;
}

}  // namespace powersgd::kernels::cuda
