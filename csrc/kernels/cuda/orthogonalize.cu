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
//   3. If a pivot was weak (numerics.h), the block computes the Gram matrix of its new rows.
//      Another block for each tile goes on as in 2.
//   4. The same, for the last time.
// Where there is no need for 3. and 4., their blocks end once enough tiles have said so.
//
// The rows are few and the launch is a chain of waits. So what does not depend on other blocks is
// loaded before the wait for them, barriers are few, and one warp factorizes.
//
// A dead column of p_hat is 0. So is the row of Q that follows from it, which tells reconstruct.
// Each row of p_hat depends on that row of P alone, so rows of zeros stay zeros.
//
// Fukaya, Nakatsukasa, Yanagisawa, Yamamoto, "CholeskyQR2: a simple and communication-avoiding
// algorithm" (ScalA 2014). A double Gram matrix of float columns leaves an error of 1e-16 times the
// squared condition number. One pass is enough up to condition numbers of 1e4, and two beyond.
#include "kernels/cuda/dispatch.cuh"
#include "kernels/cuda/orthogonalize_tile.cuh"

namespace powersgd::kernels::cuda {
namespace {

// How a launch divides its tickets.
struct Tickets {
  int64_t first_tile;
  int32_t tiles;
  // One block runs even in a bucket without matrices.
  __host__ __device__ int32_t all() const { return tiles > 0 ? (1 + kMaxPasses) * tiles : 1; }
};

template <int R>
__device__ __forceinline__ void check_matrix(const Bucket& bucket, const Tile& tile) {
  const Matrix matrix = bucket.matrices[tile.item];
  // Notes in Bucket::counters that this launch has found an element of P that is not finite.
  if (gram_of_tile<R>(bucket, matrix, tile, p_of(bucket, matrix), 0))
    raise_to(&bucket.counters[kNonFiniteP], shared()->ticket.launch + 1);
}

// The minimum number of resident blocks. Those of 2. should be resident when 1. ends, but none may
// spill.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kBlocksAtHighestRank = 1;
#else
constexpr int kBlocksAtHighestRank = 2;
#endif
template <int R>
constexpr int kBlocksPerProcessor = R > 16  ? kBlocksAtHighestRank
                                    : R > 8 ? 2
                                            : 4;

template <int R>
__global__ void __launch_bounds__(kThreads, kBlocksPerProcessor<R>)
    orthogonalize_kernel(const __grid_constant__ Bucket bucket, Tickets tickets) {
  const Ticket ticket =
      take_ticket(&bucket.counters[kOrthogonalizeTickets], tickets.all(), &shared()->ticket);
  if (ticket.order < tickets.tiles) {
    check_matrix<R>(bucket, bucket.tiles[tickets.first_tile + ticket.order]);
    post(&bucket.counters[kGramsWritten]);
    return;
  }
  const bool told_to_skip = !(p_payload(bucket)[bucket.p_numel - 1] == 0);
  if (tickets.tiles == 0) {
    if (threadIdx.x == 0) bucket.state->skipped = told_to_skip ? 1 : 0;
    return;
  }
  const int32_t index = ticket.order - tickets.tiles;
  const int pass = index / tickets.tiles;
  const Tile tile = bucket.tiles[tickets.first_tile + index % tickets.tiles];
  const Matrix matrix = bucket.matrices[tile.item];
  const bool unused = out_of_use(bucket, matrix);
  StagedRows<R> rows(solve_arrays<R>().rows, matrix.rank, tile);
  if (pass == 0) rows.load(p_of(bucket, matrix));
  await(&bucket.counters[kGramsWritten],
        (ticket.launch + 1) * static_cast<uint64_t>(tickets.tiles));
  // Not before: the successor's blocks would wait on every processor for as long as this kernel
  // runs, and leave no room for the backward pass.
  allow_successor();
  const bool skip = told_to_skip || bucket.counters[kNonFiniteP] == ticket.launch + 1;
  uint64_t* const passes = &bucket.counters[tile.counter];
  const uint64_t number = ticket.launch * kMaxPasses + static_cast<uint64_t>(pass);
  if (pass > 0) {
    await(passes, number * static_cast<uint64_t>(tile.parts));
    if (load_acquire(&bucket.counters[tile.counter + 1]) < number) return;
  }
  const bool again = orthogonalize_tile<R>(bucket, matrix, tile, rows, pass, skip || unused);
  if (index == 0 && threadIdx.x == 0) bucket.state->skipped = skip ? 1 : 0;
  // Each block of a matrix finds the same, and one says so.
  if (again && tile.part == 0 && threadIdx.x == 0)
    raise_to(&bucket.counters[tile.counter + 1], number + 1);
  // The last pass of a matrix counts for those that are not needed, so that their blocks end
  // without another wait.
  post(passes, again ? 1 : static_cast<uint64_t>(kMaxPasses - pass));
}

template <int R>
Status launch_orthogonalize(const Bucket& bucket, Stream stream) {
  const int64_t* begin = bucket.tile_list_begin.data();
  const Tickets tickets{
      begin[kOrthogonalizeTiles],
      static_cast<int32_t>(begin[kOrthogonalizeTiles + 1] - begin[kOrthogonalizeTiles])};
  return launch<orthogonalize_kernel<R>>(tickets.all(), kSharedBytes<R>, stream,
                                         Predecessor::kAnything, bucket, tickets);
}

}  // namespace

Status orthogonalize(const Bucket& bucket, Stream stream) {
  return with_rank<1, 2, 4, 8, 16, kMaxRank>(
      bucket, [&](auto rank) { return launch_orthogonalize<rank>(bucket, stream); });
}

}  // namespace powersgd::kernels::cuda
