// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>

#include "kernels/shared/host_device.h"
#include "powersgd/kernels/kernels.h"

// How both devices find their way in a bucket: workspace slots, payloads and factors.

namespace powersgd::kernels {

constexpr int64_t kSlotBytes = 64;  // the unit of Tile::slot, an offset into the workspace

POWERSGD_HOST_DEVICE constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

POWERSGD_HOST_DEVICE constexpr int64_t round_up(int64_t value, int64_t multiple) {
  return ceil_div(value, multiple) * multiple;
}

// The slots that `bytes` of the workspace take.
POWERSGD_HOST_DEVICE constexpr int64_t slots(int64_t bytes) { return ceil_div(bytes, kSlotBytes); }

template <typename T>
POWERSGD_HOST_DEVICE inline T* slot_pointer(const Bucket& bucket, int64_t slot) {
  return reinterpret_cast<T*>(static_cast<unsigned char*>(bucket.workspace) + slot * kSlotBytes);
}

template <typename T>
POWERSGD_HOST_DEVICE inline T* elements(void* base, int64_t offset) {
  return static_cast<T*>(base) + offset;
}

// The use that project reports to the other ranks: 1 if this rank has used the matrix, else 0.
POWERSGD_HOST_DEVICE inline int use_of(const Bucket& bucket, int32_t matrix) {
  return bucket.used == nullptr || bucket.used[matrix] != 0 ? 1 : 0;
}

// True if no rank has used the matrix, by the reduced P payload.
POWERSGD_HOST_DEVICE inline bool out_of_use(const Bucket& bucket, const Matrix& matrix) {
  return matrix.use_offset >= 0 && *elements<float>(bucket.p_payload, matrix.use_offset) == 0;
}

// P or p_hat of a matrix: [rows, rank].
struct TallFactor {
  float* data;
  int64_t rank;

  POWERSGD_HOST_DEVICE float& at(int64_t row, int64_t column) const {
    return data[row * rank + column];
  }
};

POWERSGD_HOST_DEVICE inline TallFactor p_of(const Bucket& bucket, const Matrix& matrix) {
  return {elements<float>(bucket.p_payload, matrix.p_offset), matrix.rank};
}

POWERSGD_HOST_DEVICE inline TallFactor p_hat_of(const Matrix& matrix) {
  return {static_cast<float*>(matrix.p_hat), matrix.rank};
}

}  // namespace powersgd::kernels
