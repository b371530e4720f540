// SPDX-License-Identifier: BSD-3-Clause
//
// orthogonalize: p_hat = orth(P), by Cholesky-QR with a Gram matrix in double.
//
// One launch does all. Its blocks take tickets, in this order:
//   1. A block for each tile of rows computes the Gram matrix of its rows. Others look at the raw
//      segments, if the wire may have overflowed there.
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
#include "kernels/cuda/gram.cuh"
#include "kernels/cuda/grid.cuh"
#include "kernels/cuda/plain_orthogonalize.cuh"

namespace powersgd::kernels::cuda {
namespace {

// How a launch divides its tickets.
struct Tickets {
  int64_t first_tile, tiles;          // of matrices
  int64_t first_raw_tile, raw_tiles;  // of raw segments
  __host__ __device__ int64_t checks() const { return tiles + raw_tiles; }
  // One block runs even in a bucket without matrices.
  __host__ __device__ int64_t all() const {
    return checks() + (tiles > 0 ? kMaxPasses * tiles : 1);
  }
};

struct alignas(16) Shared {
  Ticket ticket;
  Pivots pivots;
  int32_t order[kMaxFastRank], next_order[kMaxFastRank];
};
constexpr size_t kSharedBytes = sizeof(Shared) + kGramSharedBytes;
static_assert(sizeof(double) * (kThreads + kMaxFastRank * (kMaxFastRank + 2)) <= kGramSharedBytes,
              "shared memory holds the factor");

__device__ __forceinline__ Shared* shared() { return reinterpret_cast<Shared*>(shared_memory()); }
__device__ __forceinline__ double* scratch() { return reinterpret_cast<double*>(shared() + 1); }

// The partial Gram matrix of a tile, a lower triangle. Even and odd passes have arrays of their
// own, because a block may be a pass ahead of another.
__device__ __forceinline__ double* partial_gram(const Bucket& bucket, const Matrix& matrix,
                                                const Tile& tile, int64_t part, int pass) {
  return slot_pointer<double>(bucket, tile.slot + pass_plan_slots() +
                                          (pass % 2 * tile.parts + part) * gram_slots(matrix.rank));
}

__device__ __forceinline__ PassPlan& pass_plan(const Bucket& bucket, const Tile& tile, int pass) {
  return slot_pointer<PassPlan>(bucket, tile.slot)[pass];
}

// Phase 1 and 3. Returns true if an element is not finite: it has a square that is not.
template <typename X>
__device__ bool gram_of_tile(const Bucket& bucket, const Matrix& matrix, const Tile& tile,
                             const X& x, const int32_t* order, int pass) {
  double* const partial = partial_gram(bucket, matrix, tile, tile.part, pass);
  bool bad = false;
  gram(x, tile.row_begin, tile.row_end, matrix.rank, order, scratch(),
       [&](int64_t i, int64_t j, double value) {
         partial[triangle(i) + j] = value;
         bad = bad || !is_finite(value);
       });
  return bad;
}

// Notes in Bucket::counters what this launch has found in the payload.
template <typename F>
__device__ void note_elements(const Bucket& bucket, bool bad, F largest) {
  if (__syncthreads_or(bad) != 0 && threadIdx.x == 0)
    raise_to(&bucket.counters[kNonFiniteP], shared()->ticket.launch + 1);
  if (bucket.chooses_scales)
    note_largest(&bucket.counters[kLargestP], shared()->ticket.launch, largest);
}

template <typename F>
__device__ void check_matrix(const Bucket& bucket, const Tile& tile) {
  const Matrix matrix = bucket.matrices[tile.item];
  const ReducedP<F> p(bucket, matrix);
  bool bad = false;
  F largest = 0;
  if (matrix.rank <= kMaxFastRank) {
    if (threadIdx.x < kMaxFastRank) shared()->order[threadIdx.x] = static_cast<int>(threadIdx.x);
    __syncthreads();
    bad = gram_of_tile(bucket, matrix, tile, p, shared()->order, 0);
  }
  if (matrix.rank > kMaxFastRank || bucket.chooses_scales) {
    const int64_t end = tile.row_end * matrix.rank;
    for (int64_t i = tile.row_begin * matrix.rank + threadIdx.x; i < end; i += kThreads)
      bad = !examine(p.payload.load(matrix.p_offset + i), &largest) || bad;
  }
  note_elements(bucket, bad, largest);
}

// If the wire does not round, an infinite sum of a raw segment is the gradient that a plain
// all-reduce gives.
template <typename F>
__device__ void check_raw(const Bucket& bucket, const Tile& tile) {
  if (!wire_rounds(bucket) && !bucket.chooses_scales) return;
  const Payload<F> p = reduced_p<F>(bucket);
  const int64_t offset = bucket.raw_segments[tile.item].p_offset;
  bool bad = false;
  F largest = 0;
  for (int64_t i = tile.col_begin + threadIdx.x; i < tile.col_end; i += kThreads)
    bad = !examine(p.load(offset + i), &largest) || bad;
  note_elements(bucket, bad, largest);
}

// Completes what the bucket keeps of this step. One thread calls it, in the first block after all
// checks.
template <typename F>
__device__ void begin_second_half(const Bucket& bucket, bool skip) {
  BucketState& state = *bucket.state;
  state.skipped = skip ? 1 : 0;
  state.q_scale.current = state.q_scale.next;
  if (bucket.chooses_scales)
    state.p_scale.next = next_scale(
        noted_largest(bucket.counters[kLargestP], shared()->ticket.launch), state.p_scale.next);
}

// Phase 2. gram is [rank, rank] in shared memory, behind the first kThreads doubles. Returns the
// trace. If there are more threads than elements, several share the tiles, as in gram_blocks.
__device__ inline double sum_gram(const Bucket& bucket, const Matrix& matrix, const Tile& tile,
                                  int pass, double* gram) {
  const int rank = static_cast<int>(matrix.rank);
  const int64_t stride = gram_slots(matrix.rank) * (kSlotBytes / int64_t{sizeof(double)});
  const double* const partial = partial_gram(bucket, matrix, tile, 0, pass);
  const int elements = static_cast<int>(triangle(rank));
  const int at_once = elements < kThreads ? elements : kThreads;
  const int groups = kThreads / at_once < tile.parts ? kThreads / at_once : tile.parts;
  const int group = threadIdx.x / at_once;
  for (int first = 0; first < elements; first += at_once) {
    const int element = first + threadIdx.x % at_once;
    const bool active = group < groups && element < elements;
    double sum[1][1] = {};
    if (active) {
      POWERSGD_UNROLL_4
      for (int64_t t = group; t < tile.parts; t += groups)
        sum[0][0] += partial[t * stride + element];
    }
    add_groups(sum, active, groups, at_once, scratch());
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

// x L^T = p for one row, in place. The element of a dead column becomes 0.
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

template <int R, typename F, typename X>
__device__ void solve_rows(const Bucket& bucket, const Matrix& matrix, const Tile& tile, const X& p,
                           const double* factor, const double* reciprocal, int pass) {
  const int rank = static_cast<int>(matrix.rank);
  const TallFactor<F> p_hat = p_hat_of<F>(matrix);
  const int32_t* const order = shared()->order;
  for (int64_t row = tile.row_begin + threadIdx.x; row < tile.row_end; row += kThreads) {
    double x[R] = {};
    POWERSGD_UNROLL
    for (int j = 0; j < R; ++j) {
      if (j < rank) x[j] = static_cast<double>(p(row, order[j]));
    }
    solve_row<R>(factor, reciprocal, rank, x);
    POWERSGD_UNROLL
    for (int j = 0; j < R; ++j) {
      if (j >= rank) continue;
      const int32_t column = order[j];
      p_hat.at(row, column) = reciprocal[j] == 0 ? replacement<F>(bucket, matrix, pass, column, row)
                                                 : static_cast<F>(x[j]);
    }
  }
}

// Phases 2 to 4 for one tile. Returns true if another pass is needed.
template <int R, typename F, typename X>
__device__ bool orthogonalize_tile(const Bucket& bucket, const Matrix& matrix, const Tile& tile,
                                   const X& p, int pass) {
  const int64_t rank = matrix.rank;
  double* const factor = scratch() + kThreads;
  double* const reciprocal = factor + rank * rank;
  if (threadIdx.x < rank)
    shared()->order[threadIdx.x] = pass == 0 ? static_cast<int32_t>(threadIdx.x)
                                             : pass_plan(bucket, tile, pass).order[threadIdx.x];
  const double trace = sum_gram(bucket, matrix, tile, pass, factor);
  cholesky(factor, reciprocal, reciprocal + rank, rank, pivot_limits<F>(bucket, pass, trace),
           &shared()->pivots);
  solve_rows<R, F>(bucket, matrix, tile, p, factor, reciprocal, pass);
  const bool again =
      (shared()->pivots.dead != 0 || shared()->pivots.weak != 0) && pass + 1 < kMaxPasses;
  if (!again) return false;
  if (threadIdx.x == 0) live_first(reciprocal, shared()->order, rank, shared()->next_order);
  __syncthreads();
  const TallFactor<F> p_hat = p_hat_of<F>(matrix);
  gram_of_tile(
      bucket, matrix, tile, [&](int64_t row, int64_t column) { return p_hat.at(row, column); },
      shared()->next_order, pass + 1);
  return true;
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

template <int R, bool kAnyRank, typename F>
__global__ void __launch_bounds__(kThreads)
    orthogonalize_kernel(const __grid_constant__ Bucket bucket, Tickets tickets) {
  allow_successor();
  const Ticket ticket =
      take_ticket(&bucket.counters[kOrthogonalizeTickets], tickets.all(), &shared()->ticket);
  if (ticket.order < tickets.checks()) {
    if (ticket.order < tickets.tiles)
      check_matrix<F>(bucket, bucket.tiles[tickets.first_tile + ticket.order]);
    else
      check_raw<F>(bucket, bucket.tiles[tickets.first_raw_tile + ticket.order - tickets.tiles]);
    post(&bucket.counters[kGramsWritten]);
    return;
  }
  const auto checks = static_cast<uint64_t>(tickets.checks());
  await(&bucket.counters[kGramsWritten], (ticket.launch + 1) * checks);
  const bool skip = bucket.counters[kNonFiniteP] == ticket.launch + 1 ||
                    reduced_p<F>(bucket).has_count(bucket.p_numel - 1);
  if (ticket.order == tickets.checks() && threadIdx.x == 0) begin_second_half<F>(bucket, skip);
  if (tickets.tiles == 0) return;
  const int64_t index = ticket.order - tickets.checks();
  const Tile tile = bucket.tiles[tickets.first_tile + index % tickets.tiles];
  const Matrix matrix = bucket.matrices[tile.item];
  const int pass = static_cast<int>(index / tickets.tiles);
  uint64_t* const passes = &bucket.counters[tile.counter];
  await(passes, (ticket.launch * kMaxPasses + static_cast<uint64_t>(pass)) *
                    static_cast<uint64_t>(tile.parts));
  bool again = false;
  if (!skip && !out_of_use(bucket, matrix))
    again = run_pass<R, kAnyRank, F>(bucket, matrix, tile, pass);
  plan_next_pass(bucket, matrix, tile, pass, again);
  post(passes);
}

template <int R, bool kAnyRank, typename F>
Status launch_orthogonalize(const Bucket& bucket, Stream stream) {
  const int64_t* begin = bucket.tile_list_begin.data();
  const Tickets tickets{begin[kOrthogonalizeTiles],
                        begin[kOrthogonalizeTiles + 1] - begin[kOrthogonalizeTiles],
                        begin[kRawCheckTiles], begin[kRawCheckTiles + 1] - begin[kRawCheckTiles]};
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
