// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "kernels/cuda/gram.cuh"
#include "kernels/shared/philox.h"

// The plain way to orthogonalize: one block does all of a matrix, in up to three passes. It serves
// ranks above kMaxFastRank, and matrices whose columns are dependent or nearly so.

namespace powersgd::kernels::cuda {

// The arrays of plain_slots(rank).
struct PlainArrays {
  double* gram;     // [rank, rank]; the Cholesky factor afterwards
  double* inverse;  // [rank, rank]: the transposed inverse of that, upper triangular
  double* reciprocal;
  double* square;
  int32_t* map;   // position in the order of orthogonalization -> column
  int32_t* next;  // the map of the next pass

  __device__ PlainArrays(double* base, int64_t rank)
      : gram(base),
        inverse(base + rank * rank),
        reciprocal(inverse + rank * rank),
        square(reciprocal + rank),
        map(reinterpret_cast<int32_t*>(square + rank)),
        next(map + rank) {}
};

// inverse = L^-T for the Cholesky factor L; the rows of dead columns are 0. One thread per column.
__device__ inline void invert(const PlainArrays& arrays, int64_t rank) {
  for (int64_t c = threadIdx.x; c < rank; c += kThreads) {
    for (int64_t r = 0; r < c; ++r) arrays.inverse[c * rank + r] = 0;
    arrays.inverse[c * rank + c] = arrays.reciprocal[c];
    for (int64_t r = c + 1; r < rank; ++r) {
      double sum = 0;
      for (int64_t k = c; k < r; ++k)
        sum += arrays.gram[r * rank + k] * arrays.inverse[c * rank + k];
      arrays.inverse[c * rank + r] = -sum * arrays.reciprocal[r];
    }
  }
  __syncthreads();
}

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

// p_hat = x times the inverse, columns in the order of the map. x may be p_hat: the last column in
// that order needs all others, and is the first to be written.
template <typename F>
__device__ void apply_inverse(const Bucket& bucket, const Matrix& matrix, const TallFactor<F>& x,
                              const PlainArrays& arrays, int pass) {
  const TallFactor<F> p_hat = p_hat_of<F>(matrix);
  const int64_t rank = matrix.rank;
  for (int64_t row = threadIdx.x; row < matrix.rows; row += kThreads) {
    for (int64_t position = rank - 1; position >= 0; --position) {
      const int64_t column = arrays.map[position];
      if (arrays.reciprocal[position] == 0) {
        // Nothing live depends on a dead column.
        p_hat.at(row, column) = replacement<F>(bucket, matrix, pass, column, row);
        continue;
      }
      double sum = 0;
      for (int64_t k = 0; k <= position; ++k)
        sum += x.at(row, arrays.map[k]) * arrays.inverse[k * rank + position];
      p_hat.at(row, column) = static_cast<F>(sum);
    }
  }
  __syncthreads();
}

// Live columns first, in their order, then the dead ones.
__device__ inline void reorder(PlainArrays* arrays, int64_t rank) {
  if (threadIdx.x == 0) {
    int64_t count = 0;
    for (const bool live : {true, false}) {
      for (int64_t i = 0; i < rank; ++i) {
        if ((arrays->reciprocal[i] != 0) == live) arrays->next[count++] = arrays->map[i];
      }
    }
  }
  int32_t* const map = arrays->map;
  arrays->map = arrays->next;
  arrays->next = map;
  __syncthreads();
}

// 1. The block computes the Gram matrix and its Cholesky factor. A pivot at or below a share of the
//    trace means that the column depends on those before it. It is dead, and left out.
// 2. The columns are multiplied by the inverse factor. Dead columns become random.
// 3. Both are repeated while a column was dead or a pivot weak (numerics.h). Dead columns come
//    last, so that they are made orthogonal to the live ones and not the reverse.
template <typename F>
__device__ __attribute__((noinline)) void orthogonalize_plainly(const Bucket& bucket,
                                                                const Matrix& matrix,
                                                                double* workspace) {
  const int64_t rank = matrix.rank;
  PlainArrays arrays(workspace, rank);
  for (int64_t i = threadIdx.x; i < rank; i += kThreads) arrays.map[i] = static_cast<int32_t>(i);
  __syncthreads();
  TallFactor<F> x = p_of<F>(bucket, matrix);
  for (int pass = 0; pass < kMaxPasses; ++pass) {
    gram(x, 0, matrix.rows, rank, arrays.map,
         [&](int64_t i, int64_t j, double value) { arrays.gram[i * rank + j] = value; });
    double trace = 0;
    for (int64_t i = 0; i < rank; ++i) trace += arrays.gram[i * rank + i];
    __syncthreads();
    const Pivots pivots = pass == 0 ? cholesky(arrays.gram, arrays.reciprocal, arrays.square, rank,
                                               dead_share(bucket.epsilon) * trace, 0, kWeakPivot<F>)
                                    : cholesky(arrays.gram, arrays.reciprocal, arrays.square, rank,
                                               0, kDeadPivot, kWeakPivot<F>);
    invert(arrays, rank);
    apply_inverse(bucket, matrix, x, arrays, pass);
    if (!pivots.dead && !pivots.weak) break;
    reorder(&arrays, rank);
    x = p_hat_of<F>(matrix);
  }
}

}  // namespace powersgd::kernels::cuda
