// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "kernels/cuda/payload.cuh"
#include "kernels/shared/numerics.h"
#include "kernels/shared/philox.h"

// What takes the place of dead columns in orthogonalize, and the order of columns after that.

namespace powersgd::kernels::cuda {

// An element of the random column that replaces a dead one, of about unit norm and another in each
// pass. A column that is still dead in the last pass becomes 0: with more columns than rows, there
// is no direction left.
template <typename F>
__device__ F replacement(const Bucket& bucket, const Matrix& matrix, int pass, int64_t column,
                         int64_t row) {
  if (pass + 1 == kMaxPasses) return 0;
  const double scale = sqrt(3.0 / static_cast<double>(matrix.rows));
  return static_cast<F>(scale * random_element(bucket.seed, matrix.random_id, bucket.state->step,
                                               RandomUse::kDeadColumn,
                                               replacement_number(column, pass),
                                               static_cast<uint64_t>(row)));
}

// Live columns first, in their order, then the dead ones, whose reciprocals are 0. So the dead ones
// are made orthogonal to the live ones and not the reverse. One thread calls it.
__device__ inline void live_first(const double* reciprocal, const int32_t* order, int64_t rank,
                                  int32_t* next) {
  int64_t count = 0;
  for (const bool live : {true, false}) {
    for (int64_t i = 0; i < rank; ++i) {
      if ((reciprocal[i] != 0) == live) next[count++] = order[i];
    }
  }
}

}  // namespace powersgd::kernels::cuda
