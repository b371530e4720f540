// SPDX-License-Identifier: BSD-3-Clause
//
// orthogonalize: p_hat = orth(P), by Cholesky-QR with a Gram matrix in double.
//
// One launch does all. Its blocks take tickets, in this order:
//   1. A block for each tile of rows computes the Gram matrix of its rows.
//   2. When all of 1. are done, it is known whether the step is skipped. If not, a block for each
//      tile adds the tiles' Gram matrices of its matrix in their order and factorizes the sum,
//      G = L L^T. The matrix is small, and cheaper to factorize again than to wait for. The block
//      then solves p_hat L^T = P for its rows, one row per thread at a time, in double.
//   3. If a column was dead or a pivot weak (numerics.h), dead columns have become random, and the
//      block computes the Gram matrix of its new rows. Another block for each tile goes on as in 2.
//      The dead columns come last, so that they are made orthogonal to the live ones.
//   4. The same, for the last time.
// Where there is no need for 3. and 4., their blocks end at once.
//
// Fukaya, Nakatsukasa, Yanagisawa, Yamamoto, "CholeskyQR2: a simple and communication-avoiding
// algorithm" (ScalA 2014). A double Gram matrix of float columns leaves an error of 1e-16 times the
// squared condition number. One pass is enough up to condition numbers of 1e4, and two beyond.
// Double columns take two.
#include "kernels/cuda/dispatch.cuh"
#include "kernels/cuda/orthogonalize_tile.cuh"
#include "kernels/cuda/plain_orthogonalize.cuh"

namespace powersgd::kernels::cuda {
namespace {

// How a launch divides its tickets.
struct Tickets {
  int64_t first_tile;
  int32_t tiles;
  // One block runs even in a bucket without matrices.
  __host__ __device__ int32_t all() const { return tiles > 0 ? (1 + kMaxPasses) * tiles : 1; }
};

template <typename F>
__device__ void check_matrix(const Bucket& bucket, const Tile& tile) {
  const Matrix matrix = bucket.matrices[tile.item];
  const ReducedP<F> p(bucket, matrix);
  bool bad = false;
  if (matrix.rank <= kMaxFastRank) {
    if (threadIdx.x < kMaxFastRank) shared()->order[threadIdx.x] = static_cast<int>(threadIdx.x);
    __syncthreads();
    bad = gram_of_tile(bucket, matrix, tile, p, shared()->order, 0);
  } else {
    const int64_t end = tile.row_end * matrix.rank;
    for (int64_t i = tile.row_begin * matrix.rank + threadIdx.x; i < end; i += kThreads)
      bad = !is_finite(p.elements[i]) || bad;
  }
  // Notes in Bucket::counters that this launch has found such an element.
  if (__syncthreads_or(bad) != 0 && threadIdx.x == 0)
    raise_to(&bucket.counters[kNonFiniteP], shared()->ticket.launch + 1);
}

// A matrix of high rank is done in the first pass, in a kernel for any rank.
template <int R, bool kAnyRank, typename F>
__device__ bool run_pass(const Bucket& bucket, const Matrix& matrix, const Tile& tile, int pass) {
  if (kAnyRank && matrix.rank > kMaxFastRank) {
    if (pass == 0)
      orthogonalize_plainly<F>(bucket, matrix, slot_pointer<double>(bucket, tile.slot),
                               &shared()->pivots, scratch());
    return false;
  }
  if (pass == 0)
    return orthogonalize_tile<R, F>(bucket, matrix, tile, ReducedP<F>(bucket, matrix), pass);
  if (pass_plan(bucket, tile, pass).needed == 0) return false;
  const TallFactor<F> p_hat = p_hat_of<F>(matrix);
  return orthogonalize_tile<R, F>(
      bucket, matrix, tile, [&](int64_t row, int64_t column) { return p_hat.at(row, column); },
      pass);
}

// Each block of a matrix finds the same, and one says so.
__device__ __forceinline__ void plan_next_pass(const Bucket& bucket, const Matrix& matrix,
                                               const Tile& tile, int pass, bool needed) {
  if (tile.part != 0 || pass + 1 == kMaxPasses || matrix.rank > kMaxFastRank) return;
  PassPlan& plan = pass_plan(bucket, tile, pass + 1);
  if (threadIdx.x == 0) plan.needed = needed ? 1 : 0;
  if (needed && threadIdx.x < matrix.rank)
    plan.order[threadIdx.x] = shared()->next_order[threadIdx.x];
}

// At least so many blocks are resident. 0 leaves the choice to the compiler, which would rather
// spill than have a single block at rank 32.
template <int R>
constexpr int kBlocksPerProcessor = R > 16 ? 1 : 0;

template <int R, bool kAnyRank, typename F>
__global__ void __launch_bounds__(kThreads, kBlocksPerProcessor<R>)
    orthogonalize_kernel(const __grid_constant__ Bucket bucket, Tickets tickets) {
  const Ticket ticket =
      take_ticket(&bucket.counters[kOrthogonalizeTickets], tickets.all(), &shared()->ticket);
  if (ticket.order < tickets.tiles) {
    check_matrix<F>(bucket, bucket.tiles[tickets.first_tile + ticket.order]);
    post(&bucket.counters[kGramsWritten]);
    return;
  }
  const auto checks = static_cast<uint64_t>(tickets.tiles);
  await(&bucket.counters[kGramsWritten], (ticket.launch + 1) * checks);
  // Not before: the successor's blocks would wait on every processor for as long as this kernel
  // runs, and leave no room for the backward pass.
  allow_successor();
  const bool skip = bucket.counters[kNonFiniteP] == ticket.launch + 1 ||
                    !(p_payload<F>(bucket)[bucket.p_numel - 1] == 0);
  if (ticket.order == tickets.tiles && threadIdx.x == 0) bucket.state->skipped = skip ? 1 : 0;
  if (tickets.tiles == 0) return;
  const int32_t index = ticket.order - tickets.tiles;
  const Tile tile = bucket.tiles[tickets.first_tile + index % tickets.tiles];
  const Matrix matrix = bucket.matrices[tile.item];
  const int pass = index / tickets.tiles;
  uint64_t* const passes = &bucket.counters[tile.counter];
  await(passes, (ticket.launch * kMaxPasses + static_cast<uint64_t>(pass)) *
                    static_cast<uint64_t>(tile.parts));
  bool again = false;
  if (!skip && !out_of_use<F>(bucket, matrix))
    again = run_pass<R, kAnyRank, F>(bucket, matrix, tile, pass);
  plan_next_pass(bucket, matrix, tile, pass, again);
  post(passes);
}

template <int R, bool kAnyRank, typename F>
Status launch_orthogonalize(const Bucket& bucket, Stream stream) {
  const int64_t* begin = bucket.tile_list_begin.data();
  const Tickets tickets{
      begin[kOrthogonalizeTiles],
      static_cast<int32_t>(begin[kOrthogonalizeTiles + 1] - begin[kOrthogonalizeTiles])};
  return launch<orthogonalize_kernel<R, kAnyRank, F>>(tickets.all(), kSharedBytes, stream,
                                                      Predecessor::kAnything, bucket, tickets);
}

}  // namespace

Status orthogonalize(const Bucket& bucket, Stream stream) {
  if (bucket.factor_dtype == DType::kFloat64)
    return launch_orthogonalize<kMaxFastRank, true, double>(bucket, stream);
  return with_rank<1, 2, 4, 8, 16, kMaxFastRank>(bucket, [&](auto rank) {
    constexpr int kRanks = rank == 0 ? kMaxFastRank : rank;
    return launch_orthogonalize < kRanks, rank == 0, float > (bucket, stream);
  });
}

}  // namespace powersgd::kernels::cuda
