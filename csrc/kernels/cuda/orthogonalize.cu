// SPDX-License-Identifier: BSD-3-Clause
//
// orthogonalize: p_hat = orth(P), by Cholesky-QR with a Gram matrix in double.
//
// 1. A first kernel computes the Gram matrix of each tile's rows.
// 2. In a second kernel, every block reads from all tiles and from the count of non-finite
//    gradients whether the step is skipped. If not, every block of a matrix adds the tiles' Gram
//    matrices in their order and factorizes the sum, G = L L^T. The matrix is small, and cheaper to
//    factorize again than to wait for.
// 3. The block then solves p_hat L^T = P for the rows of its tile, one row per thread at a time, in
//    double. If a column is dead or a pivot weak, the first block of the matrix goes the plain way
//    instead, and the others leave.
//
// Fukaya, Nakatsukasa, Yanagisawa, Yamamoto, "CholeskyQR2: a simple and communication-avoiding
// algorithm" (ScalA 2014). A double Gram matrix of float columns leaves an error of 1e-16 times the
// squared condition number. One pass is enough up to condition numbers of 1e4, and two beyond.
// Double columns take two.
#include "kernels/cuda/dispatch.cuh"
#include "kernels/cuda/gram.cuh"
#include "kernels/cuda/plain_orthogonalize.cuh"

namespace powersgd::kernels::cuda {
namespace {

// Phase 1 for one tile. Returns to all threads whether any of it is not finite.
template <typename F>
__device__ bool gram_of_tile(const Bucket& bucket, const Matrix& matrix, const Tile& tile) {
  const TallFactor<F> p = p_of<F>(bucket, matrix);
  bool bad = false;
  if (matrix.rank > kMaxFastRank) {
    for (int64_t i = threadIdx.x; i < matrix.rows * matrix.rank; i += kThreads)
      bad = bad || !is_finite(p.data[i]);
  } else {
    // A column that is not finite has a square that is not.
    double* const partial = slot_pointer<double>(bucket, tile.slot);
    gram(p, tile.row_begin, tile.row_end, matrix.rank, nullptr,
         [&](int64_t i, int64_t j, double value) {
           partial[triangle(i) + j] = value;
           bad = bad || !is_finite(value);
         });
  }
  return __syncthreads_or(bad) != 0;
}

// The workspace starts with a flag per tile: whether it is not finite.
template <typename F>
__global__ void __launch_bounds__(kThreads) gram_kernel(Bucket bucket, int64_t first_tile) {
  begin_kernel();
  const Tile tile = bucket.tiles[first_tile + blockIdx.x];
  const bool bad = gram_of_tile<F>(bucket, bucket.matrices[tile.item], tile);
  if (threadIdx.x == 0) slot_pointer<int32_t>(bucket, 0)[blockIdx.x] = bad ? 1 : 0;
}

// True if the step is skipped. No matrix of the bucket may then be touched.
template <typename F>
__device__ __forceinline__ bool skips(const Bucket& bucket, int64_t tiles) {
  // True for NaN as well.
  bool bad = !(static_cast<const F*>(bucket.p_payload)[bucket.p_numel - 1] == 0);
  const int32_t* const flags = slot_pointer<int32_t>(bucket, 0);
  for (int64_t i = threadIdx.x; i < tiles; i += kThreads) bad = bad || flags[i] != 0;
  return __syncthreads_or(bad) != 0;
}

// Phase 2. gram is [rank, rank] in shared memory, behind the first kThreads doubles. Returns the
// trace. If there are more threads than elements, several share the tiles, as in gram_blocks.
__device__ inline double sum_gram(const Bucket& bucket, const Matrix& matrix, const Tile& tile,
                                  double* gram) {
  const int rank = static_cast<int>(matrix.rank);
  const int64_t rows = orthogonalize_rows(matrix.rows, matrix.rank);
  const int64_t tiles = ceil_div(matrix.rows, rows);
  const int64_t stride = gram_slots(matrix.rank) * (kSlotBytes / int64_t{sizeof(double)});
  const double* const partial =
      slot_pointer<double>(bucket, tile.slot) - tile.row_begin / rows * stride;
  const int elements = static_cast<int>(triangle(rank));
  const int at_once = elements < kThreads ? elements : kThreads;
  const int groups = kThreads / at_once;
  const int group = threadIdx.x / at_once;
  for (int first = 0; first < elements; first += at_once) {
    const int element = first + threadIdx.x % at_once;
    const bool active = group < groups && element < elements;
    double sum[1][1] = {};
    if (active) {
      POWERSGD_UNROLL_4
      for (int64_t t = group; t < tiles; t += groups) sum[0][0] += partial[t * stride + element];
    }
    add_groups(sum, active, groups, at_once);
    if (!active || group > 0) continue;
    int64_t row, column;
    locate_in_triangle(element, &row, &column);
    gram[row * rank + column] = sum[0][0];
  }
  __syncthreads();
  double trace = 0;
  for (int i = 0; i < rank; ++i) trace += gram[i * (rank + 1)];
  return trace;
}

// Phase 3 for one row: x L^T = p in place.
template <int R>
__device__ __forceinline__ void solve_row(const double* factor, const double* reciprocal, int rank,
                                          double (&x)[R]) {
  POWERSGD_UNROLL
  for (int j = 0; j < R; ++j) {
    if (j >= rank) continue;
    POWERSGD_UNROLL
    for (int i = 0; i < j; ++i) x[j] -= factor[j * rank + i] * x[i];
    x[j] *= reciprocal[j];
  }
}

// Visits the first `count` elements of a row in turn.
template <int R, typename F, typename Visit>
__device__ __forceinline__ void visit_row(const TallFactor<F>& factor, int64_t row, int count,
                                          const Visit& visit) {
  F* const values = &factor.at(row, 0);
  POWERSGD_UNROLL
  for (int j = 0; j < R; ++j) {
    if (j < count) visit(j, values[j]);
  }
}

template <int R, typename F>
__device__ void solve_rows(const Bucket& bucket, const Matrix& matrix, const Tile& tile,
                           const double* factor, const double* reciprocal) {
  constexpr int kRowsAtOnce = R <= 4 ? 4 : R <= 8 ? 2 : 1;  // loaded before any is solved
  const int rank = static_cast<int>(matrix.rank);
  const TallFactor<F> p = p_of<F>(bucket, matrix);
  const TallFactor<F> p_hat = p_hat_of<F>(matrix);
  for (int64_t first = tile.row_begin + threadIdx.x; first < tile.row_end;
       first += kRowsAtOnce * kThreads) {
    double x[kRowsAtOnce][R] = {};
    POWERSGD_UNROLL
    for (int i = 0; i < kRowsAtOnce; ++i) {
      const int64_t row = first + i * kThreads;
      visit_row<R>(p, row, row < tile.row_end ? rank : 0,
                   [&](int j, const F& element) { x[i][j] = static_cast<double>(element); });
    }
    POWERSGD_UNROLL
    for (int i = 0; i < kRowsAtOnce; ++i) {
      const int64_t row = first + i * kThreads;
      if (row >= tile.row_end) continue;
      solve_row<R>(factor, reciprocal, rank, x[i]);
      visit_row<R>(p_hat, row, rank, [&](int j, F& element) { element = static_cast<F>(x[i][j]); });
    }
  }
}

template <int R, typename F>
__global__ void __launch_bounds__(kThreads, 2)
    solve_kernel(Bucket bucket, int64_t first_tile, int64_t tiles) {
  begin_kernel();
  const bool skip = skips<F>(bucket, tiles);
  if (blockIdx.x == 0 && threadIdx.x == 0) bucket.state->skipped = skip ? 1 : 0;
  if (skip || blockIdx.x >= tiles) return;  // one block runs even in a bucket without matrices
  const Tile tile = bucket.tiles[first_tile + blockIdx.x];
  const Matrix matrix = bucket.matrices[tile.item];
  if (out_of_use<F>(bucket, matrix)) return;
  if (matrix.rank <= kMaxFastRank) {
    double* const factor = reinterpret_cast<double*>(shared_memory()) + kThreads;
    double* const reciprocal = factor + matrix.rank * matrix.rank;
    const double trace = sum_gram(bucket, matrix, tile, factor);
    const Pivots pivots = cholesky(factor, reciprocal, reciprocal + matrix.rank, matrix.rank,
                                   dead_share(bucket.epsilon) * trace, 0, kWeakPivot<F>);
    if (!pivots.dead && !pivots.weak) {
      solve_rows<R, F>(bucket, matrix, tile, factor, reciprocal);
      return;
    }
  }
  if (tile.row_begin == 0) {
    const int64_t base = tile.slot - plain_slots(matrix.rank);
    orthogonalize_plainly<F>(bucket, matrix, slot_pointer<double>(bucket, base));
  }
}

template <int R, typename F>
Status launch_orthogonalize(const Bucket& bucket, Stream stream) {
  const int64_t first = bucket.tile_list_begin[kOrthogonalizeTiles];
  const int64_t tiles = bucket.tile_list_begin[kOrthogonalizeTiles + 1] - first;
  if (const Status status =
          launch(gram_kernel<F>, tiles, kThreads, kGramSharedBytes, stream, bucket, first);
      status != 0)
    return status;
  return launch(solve_kernel<R, F>, std::max<int64_t>(tiles, 1), kThreads, kGramSharedBytes, stream,
                bucket, first, tiles);
}
static_assert(sizeof(double) * (kThreads + kMaxFastRank * (kMaxFastRank + 2)) <= kGramSharedBytes,
              "shared memory holds the factor");

}  // namespace

Status orthogonalize(const Bucket& bucket, Stream stream) {
  if (bucket.factor_dtype == DType::kFloat64)
    return launch_orthogonalize<kMaxFastRank, double>(bucket, stream);
  return with_rank<1, 2, 4, 8, 16, kMaxFastRank>(bucket, [&](auto rank) {
    constexpr int kRanks = rank == 0 ? kMaxFastRank : rank;
    return launch_orthogonalize<kRanks, float>(bucket, stream);
  });
}

}  // namespace powersgd::kernels::cuda
