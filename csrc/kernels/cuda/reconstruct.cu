// SPDX-License-Identifier: BSD-3-Clause
//
// reconstruct: G = output_scale * p_hat Q, and q_warm = the rows of Q at unit norm, or half random.
//
// One launch does all. Its blocks take tickets, in this order:
//   1. A block for each part of a row of Q adds the squares of its elements in double, and notes
//      whether one is not finite. That must be known before any gradient is overwritten.
//   2. The other blocks prepare, and wait for 1. Each takes one of two kinds of tiles:
//      - A strip of 128 columns by a range of rows of a gradient. The block copies p_hat's rows to
//        shared memory. Up to rank 8 a lane holds four columns of Q in registers. Above, the block
//        has the strip of Q in shared memory too. The first block of a strip writes q_warm, and in
//        the first strip also q_norms.
//      - A part of a raw segment.
//    If the step is skipped, the gradients become NaN, and memory and the factors are as before.
#include "kernels/cuda/dispatch.cuh"
#include "kernels/cuda/grid.cuh"
#include "kernels/cuda/reconstruct_tile.cuh"
#include "kernels/cuda/reduce.cuh"
#include "kernels/shared/redraw.h"
#include "kernels/shared/steps.h"

namespace powersgd::kernels::cuda {
namespace {

// How a launch divides its tickets: those of the checks of Q's rows come first.
struct Tickets {
  const Tile* first_check;
  const Tile* first_tile;
  int32_t checks, tiles, all;
  // One block runs even in an empty bucket.
  Tickets(const Bucket& bucket)
      : first_check(bucket.tiles + bucket.tile_list_begin[kQCheckTiles]),
        first_tile(bucket.tiles + bucket.tile_list_begin[kReconstructTiles]),
        checks(count(bucket, kQCheckTiles)),
        tiles(count(bucket, kReconstructTiles)),
        all(checks + std::max(tiles, 1)) {}

 private:
  static int32_t count(const Bucket& bucket, TileList list) {
    return static_cast<int32_t>(bucket.tile_list_begin[list + 1] - bucket.tile_list_begin[list]);
  }
};

// The tile of the block that has taken a ticket after those of the checks.
__device__ __forceinline__ const Tile& tile_of(const Tickets& tickets, const Ticket& ticket) {
  return tickets.first_tile[ticket.order - tickets.checks];
}

// The sums of squares of a matrix's Q: [rank, parts].
__device__ __forceinline__ double* squares_of(const Bucket& bucket, const Tile& tile) {
  return slot_pointer<double>(bucket, tile.slot);
}

// Phase 1.
__device__ void check_row(const Bucket& bucket, const Tile& tile) {
  const Matrix matrix = bucket.matrices[tile.item];
  const float* const q = q_payload(bucket);
  const int64_t k = tile.row_begin;
  const int64_t offset = matrix.q_offset + k * matrix.cols;
  bool bad = false;
  double squares = 0;
  for (int64_t col = tile.col_begin + threadIdx.x; col < tile.col_end; col += kThreads) {
    const float value = q[offset + col];
    bad = !is_finite(value) || bad;
    squares += static_cast<double>(value) * static_cast<double>(value);
  }
  double* const partial = reinterpret_cast<double*>(shared_memory() + kTicketBytes);
  squares = warp_sum(squares);
  if (threadIdx.x % kWarpSize == 0) partial[threadIdx.x / kWarpSize] = squares;
  bad = __syncthreads_or(bad) != 0;
  if (threadIdx.x != 0) return;
  if (bad) atomicOr(&bucket.state->skipped, 1);
  double sum = 0;
  for (int w = 0; w < kWarps; ++w) sum += partial[w];
  squares_of(bucket, tile)[k * tile.parts + tile.part] = sum;
}

// The norm of row k of Q.
__device__ inline double norm_of_row(const Bucket& bucket, const Tile& tile, int64_t k) {
  const double* const squares = squares_of(bucket, tile);
  double sum = 0;
  for (int part = 0; part < tile.parts; ++part) sum += squares[k * tile.parts + part];
  return sqrt(sum);
}

// q_norms[k], which the first strip of a matrix writes.
__device__ inline void store_norm(const Matrix& matrix, const Tile& tile, int64_t k, double norm) {
  if (tile.col_begin == 0 && matrix.q_norms != nullptr) matrix.q_norms[k] = norm;
}

static_assert(kStrip == 4 * kWarpSize, "each lane of warm_row has four columns");

// q_warm at the columns of a strip that a lane has in row k. The loads go ahead of the stores.
__device__ __forceinline__ void warm_row(const Bucket& bucket, const Matrix& matrix,
                                         const Tile& tile, int64_t k, int lane, double scale) {
  const float* const q = q_payload(bucket);
  const int width = static_cast<int>(tile.col_end - tile.col_begin);
  const int64_t begin = k * matrix.cols + tile.col_begin;
  float values[4];
  POWERSGD_UNROLL
  for (int i = 0; i < 4; ++i) {
    const int col = lane + i * kWarpSize;
    values[i] = col < width ? q[matrix.q_offset + begin + col] : 0.0f;
  }
  POWERSGD_UNROLL
  for (int i = 0; i < 4; ++i) {
    const int col = lane + i * kWarpSize;
    if (col < width)
      static_cast<float*>(matrix.q_warm)[begin + col] =
          static_cast<float>(static_cast<double>(values[i]) * scale);
  }
}

// q_local = 0 at the columns of a tile, and q_norms = 0: nothing that was sent counts.
__device__ void clear_sent(const Matrix& matrix, const Tile& tile) {
  for (int64_t i = threadIdx.x; i < matrix.rank * kStrip; i += kThreads) {
    const int64_t col = tile.col_begin + i % kStrip;
    if (col < tile.col_end) static_cast<float*>(matrix.q_local)[i / kStrip * matrix.cols + col] = 0;
  }
  for (int64_t k = threadIdx.x; k < matrix.rank; k += kThreads) store_norm(matrix, tile, k, 0);
}

// q_warm at the columns of a tile where row k of Q is zero. A warp calls it. This is rare: what it
// needs is loaded again, not held in registers.
__device__ void redraw_row(const Bucket& bucket, const Tickets& tickets, int64_t k) {
  const Tile& tile = tile_of(tickets, *reinterpret_cast<const Ticket*>(shared_memory()));
  const Matrix& matrix = bucket.matrices[tile.item];
  float* const q_warm = static_cast<float*>(matrix.q_warm) + k * matrix.cols;
  const float scale = unit_row_scale(matrix.cols);
  POWERSGD_NO_UNROLL
  for (int64_t col = tile.col_begin + lane_id(); col < tile.col_end; col += kWarpSize)
    q_warm[col] = redrawn(bucket, matrix, k, col, scale, q_warm[col]);
}

// q_warm at the columns of a tile, and q_norms. After a skipped step, or if the matrix is out of
// use, q_warm stays and q_local becomes 0. The tables are read again, because keeping them during
// the product takes too many registers.
__device__ void update_warm_start(const Bucket& bucket, const Tickets& tickets, bool skip) {
  const Tile tile = tile_of(tickets, *reinterpret_cast<const Ticket*>(shared_memory()));
  const Matrix matrix = bucket.matrices[tile.item];
  if (skip || out_of_use(bucket, matrix)) {
    clear_sent(matrix, tile);
    return;
  }
  constexpr int kRowsAtOnce = kLeastReconstructBytes / sizeof(double);
  double* const scales = reinterpret_cast<double*>(shared_memory() + kTicketBytes);
  for (int64_t first = 0; first < matrix.rank; first += kRowsAtOnce) {
    const int64_t left = matrix.rank - first;
    const int rows = left < kRowsAtOnce ? static_cast<int>(left) : kRowsAtOnce;
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < rows) {
      const double norm = norm_of_row(bucket, tile, first + threadIdx.x);
      scales[threadIdx.x] = norm > 0 ? 1 / norm : 0;
      store_norm(matrix, tile, first + threadIdx.x, norm);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < rows * kWarpSize; i += kThreads) {
      const double scale = scales[i / kWarpSize];
      if (scale > 0) warm_row(bucket, matrix, tile, first + i / kWarpSize, i % kWarpSize, scale);
    }
    POWERSGD_NO_UNROLL
    for (int k = warp_id(); k < rows; k += kWarps) {
      if (scales[k] == 0) redraw_row(bucket, tickets, first + k);
    }
  }
}

__device__ void unpack_raw(const Bucket& bucket, const Tile& tile, bool skip) {
  const RawSegment segment = bucket.raw_segments[tile.item];
  const float* const p = p_payload(bucket);
  const float scale = static_cast<float>(bucket.output_scale);
  for (int64_t i = tile.col_begin + threadIdx.x; i < tile.col_end; i += kThreads)
    store_any(bucket.gradient, segment.gradient_offset + i,
              skip ? NAN : scale * p[segment.p_offset + i], bucket.gradient_dtype);
}

// memory = M - G and G = NaN, as the step is skipped.
__device__ void skip_tile(const Bucket& bucket, const Matrix& matrix, const Tile& tile) {
  const int64_t width = tile.col_end - tile.col_begin;
  for (int64_t i = threadIdx.x; i < (tile.row_end - tile.row_begin) * width; i += kThreads) {
    const int64_t index = (tile.row_begin + i / width) * matrix.cols + tile.col_begin + i % width;
    const float g =
        load_any(bucket.gradient, matrix.gradient_offset + index, bucket.gradient_dtype);
    if (matrix.memory != nullptr && is_finite(g)) {
      const float m = load_any(matrix.memory, index, bucket.residual_dtype);
      store_any(matrix.memory, index, m - g, bucket.residual_dtype);
    }
    store_any(bucket.gradient, matrix.gradient_offset + index, NAN, bucket.gradient_dtype);
  }
}

// Registers are traded for blocks in flight. Since Blackwell the compiler needs more of them.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kBlocksAtHighRank = 2;
#else
constexpr int kBlocksAtHighRank = 3;
#endif
template <int R>
constexpr int kBlocksPerProcessor = kIsLowRank<R> ? 4 : kBlocksAtHighRank;

template <int R, typename G>
__global__ void __launch_bounds__(kThreads, kBlocksPerProcessor<R>)
    reconstruct_kernel(Bucket bucket, Tickets tickets) {
  const Ticket ticket = take_ticket(&bucket.counters[kReconstructTickets], tickets.all,
                                    reinterpret_cast<Ticket*>(shared_memory()));
  uint64_t* const checked = &bucket.counters[kQChecked];
  if (ticket.order < tickets.checks) {
    check_row(bucket, tickets.first_check[ticket.order]);
    post(checked);
    return;
  }
  // Returns whether the step is skipped. All threads call it, once.
  const auto await_checks = [&] {
    await(checked, (ticket.launch + 1) * static_cast<uint64_t>(tickets.checks));
    const bool skip = load_again(&bucket.state->skipped) != 0;
    if (skip && ticket.order == tickets.checks && threadIdx.x == 0) count_skipped_step(bucket);
    return skip;
  };
  if (tickets.tiles == 0) {
    await_checks();
    return;
  }
  const Tile tile = tile_of(tickets, ticket);
  if (tile.kind == TileKind::kRawSegment) {
    unpack_raw(bucket, tile, await_checks());
    return;
  }
  const Matrix matrix = bucket.matrices[tile.item];
  const bool skip = reconstruct_tile<R, G>(bucket, matrix, tile, await_checks);
  if (skip) skip_tile(bucket, matrix, tile);
  if (tile.row_begin == 0) update_warm_start(bucket, tickets, skip);
}

template <int R, typename G>
Status launch_reconstruct(const Bucket& bucket, Stream stream) {
  const Tickets tickets(bucket);
  return launch<reconstruct_kernel<R, G>>(tickets.all, kTicketBytes + kReconstructBytes<R, G>,
                                          stream, Predecessor::kAnything, bucket, tickets);
}

template <typename G>
Status launch_by_rank(const Bucket& bucket, Stream stream) {
  return with_rank<1, 2, 4, 8, 16, kMaxRank, kNoProducts>(
      bucket, [&](auto rank) { return launch_reconstruct<rank, G>(bucket, stream); });
}

}  // namespace

Status reconstruct(const Bucket& bucket, Stream stream) {
  return bucket.gradient_dtype == DType::kFloat32 ? launch_by_rank<float>(bucket, stream)
                                                  : launch_by_rank<uint16_t>(bucket, stream);
}

}  // namespace powersgd::kernels::cuda
