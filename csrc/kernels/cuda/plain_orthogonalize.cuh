// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "kernels/cuda/cholesky.cuh"
#include "kernels/cuda/gram.cuh"

// The plain way to orthogonalize: one block does all of a matrix. It serves ranks above
// kMaxFastRank.

namespace powersgd::kernels::cuda {

// The arrays of plain_slots(rank).
struct PlainArrays {
  double* gram;     // [rank, rank]; the Cholesky factor afterwards
  double* inverse;  // [rank, rank]: the transposed inverse of that, upper triangular
  double* reciprocal;
  double* square;

  __device__ PlainArrays(double* base, int64_t rank)
      : gram(base),
        inverse(base + rank * rank),
        reciprocal(inverse + rank * rank),
        square(reciprocal + rank) {}
};

// Column j of the Cholesky factor, by one warp, because square roots and divisions in double are
// slow on SMs with two FP64 units.
__device__ inline void finish_column(double* a, double* inverse, const double* square, int n, int j,
                                     const PivotLimits& limits, int32_t* weak) {
  const int lane = static_cast<int>(threadIdx.x);
  const double pivot = a[j * n + j];
  const bool dead = !(pivot > limits.threshold && pivot > limits.own_threshold * square[j]);
  const double scale = dead ? 0 : 1 / sqrt(pivot);
  for (int i = j + 1 + lane; i < n; i += kWarpSize) a[i * n + j] *= scale;
  if (lane != 0) return;
  inverse[j] = scale;
  if (!dead && pivot < limits.weak * square[j]) *weak = 1;
}

// The Cholesky factor L of a Gram matrix in place: a[i * rank + j], j <= i. inverse[j] becomes
// 1 / L[j][j], or 0 if column j is dead; it then takes no further part. `weak`, in shared memory,
// becomes 1 if a live pivot is weak, else 0.
__device__ inline void cholesky(double* a, double* inverse, double* square, int64_t rank,
                                const PivotLimits& limits, int32_t* weak) {
  const int n = static_cast<int>(rank);
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  for (int j = threadIdx.x; j < n; j += kThreads) square[j] = a[j * n + j];
  if (threadIdx.x == 0) *weak = 0;
  __syncthreads();
  for (int j = 0; j < n; ++j) {
    if (warp == 0) finish_column(a, inverse, square, n, j, limits, weak);
    __syncthreads();
    for (int i = j + 1 + warp; i < n; i += kWarps) {
      for (int k = j + 1 + lane; k <= i; k += kWarpSize)
        a[i * n + k] -= a[i * n + j] * a[k * n + j];
    }
    __syncthreads();
  }
}

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

// p_hat = x times the inverse. x may be p_hat: the last column needs all others, and is the first
// to be written.
template <typename F>
__device__ void apply_inverse(const Matrix& matrix, const TallFactor<F>& x,
                              const PlainArrays& arrays) {
  const TallFactor<F> p_hat = p_hat_of<F>(matrix);
  const int64_t rank = matrix.rank;
  for (int64_t row = threadIdx.x; row < matrix.rows; row += kThreads) {
    for (int64_t column = rank - 1; column >= 0; --column) {
      double sum = 0;
      for (int64_t k = 0; k <= column; ++k) sum += x.at(row, k) * arrays.inverse[k * rank + column];
      p_hat.at(row, column) = static_cast<F>(sum);
    }
  }
  __syncthreads();
}

// One pass from x to p_hat. Returns true if another one is needed.
template <typename F>
__device__ bool pass_plainly(const Bucket& bucket, const Matrix& matrix, const TallFactor<F>& x,
                             const PlainArrays& arrays, int pass, int32_t* weak) {
  const int64_t rank = matrix.rank;
  gram_plainly(x, matrix.rows, rank,
               [&](int64_t i, int64_t j, double value) { arrays.gram[i * rank + j] = value; });
  double trace = 0;
  for (int64_t i = 0; i < rank; ++i) trace += arrays.gram[i * rank + i];
  __syncthreads();
  cholesky(arrays.gram, arrays.reciprocal, arrays.square, rank,
           pivot_limits<F>(bucket, pass, trace), weak);
  invert(arrays, rank);
  apply_inverse<F>(matrix, x, arrays);
  return *weak != 0;
}

// `workspace` has room for plain_slots(rank).
template <typename F>
__device__ __attribute__((noinline)) void orthogonalize_plainly(const Bucket& bucket,
                                                                const Matrix& matrix,
                                                                double* workspace, int32_t* weak) {
  const PlainArrays arrays(workspace, matrix.rank);
  bool again = true;
  for (int pass = 0; again && pass < kMaxPasses; ++pass)
    again =
        pass_plainly<F>(bucket, matrix, pass == 0 ? p_of<F>(bucket, matrix) : p_hat_of<F>(matrix),
                        arrays, pass, weak);
}

}  // namespace powersgd::kernels::cuda
