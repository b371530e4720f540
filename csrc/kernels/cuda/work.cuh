// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "kernels/cuda/elements.cuh"
#include "kernels/shared/steps.h"

// The work of a block of project beside its products: it reads its tile, packs raw segments, notes
// what the gradient's elements are like, and writes that to the P payload.

namespace powersgd::kernels::cuda {

// The kinds of elements that a block has found in its part of the gradient, or of M where memory
// cannot hold them. It lies in shared memory, because registers are scarce. Any thread may set a
// flag to 1.
struct ElementFlags {
  int non_finite, non_zero, saturated;
};

// The tile of a block, at the start of shared memory.
struct alignas(16) Work {
  Tile tile;
  Matrix matrix;  // that the tile is a part of, unless it is one of a raw segment
  ElementFlags flags;
};

// All threads of the block call this, and end_work().
__device__ __forceinline__ Work* begin_work(const Bucket& bucket, int64_t first_tile) {
  Work* const work = reinterpret_cast<Work*>(shared_memory());
  if (threadIdx.x == 0) {
    work->tile = bucket.tiles[first_tile + blockIdx.x];
    if (work->tile.kind != TileKind::kRawSegment) work->matrix = bucket.matrices[work->tile.item];
    work->flags = {0, 0, 0};
  }
  __syncthreads();
  return work;
}

__device__ __forceinline__ void end_work(const Bucket& bucket, const Work* work) {
  __syncthreads();
  if (threadIdx.x == 0)
    slot_pointer<int32_t>(bucket, 0)[blockIdx.x] = (work->flags.non_finite ? kNonFinite : 0) |
                                                   (work->flags.non_zero ? kNonZero : 0) |
                                                   (work->flags.saturated ? kSaturated : 0);
}

// Packs a part of a raw segment into the P payload.
template <typename F, typename G>
__device__ void pack_raw(const Bucket& bucket, Work* work) {
  const Tile& tile = work->tile;
  const RawSegment segment = bucket.raw_segments[tile.item];
  const G* from = static_cast<const G*>(bucket.gradient) + segment.gradient_offset;
  F* to = elements<F>(bucket.p_payload, segment.p_offset);
  for (int64_t i = tile.col_begin + threadIdx.x; i < tile.col_end; i += kThreads) {
    const F value = widen(from[i], bucket.gradient_dtype);
    const bool finite = is_finite(value);
    to[i] = finite ? value : F{0};
    if (!finite) work->flags.non_finite = 1;
  }
}

// A block's share of a launch over raw segments and matrices. OnMatrix::run does those of matrices,
// at any rank up to R or exactly R, by vector accesses where the addresses allow them.
template <int R, bool kAnyRank, typename F, typename G, typename M, typename OnMatrix>
__device__ __forceinline__ void run_tile(const Bucket& bucket, int64_t first_tile) {
  Work* const work = begin_work(bucket, first_tile);
  if (work->tile.kind == TileKind::kRawSegment) {
    pack_raw<F, G>(bucket, work);
  } else {
    const Matrix& matrix = work->matrix;
    const bool aligned =
        is_aligned(static_cast<const G*>(bucket.gradient) + matrix.gradient_offset, matrix.cols) &&
        is_aligned(static_cast<const M*>(matrix.memory), matrix.cols) &&
        is_aligned(static_cast<const F*>(matrix.q_local), matrix.cols) &&
        is_aligned(static_cast<const F*>(matrix.q_warm), matrix.cols);
    if (!aligned)
      OnMatrix::template run<R, kAnyRank, false, 1, F, G, M>(bucket, work);
    else if (kAnyRank || (R > 1 && matrix.rank < R))
      OnMatrix::template run<R, kAnyRank, false, 4, F, G, M>(bucket, work);
    else
      OnMatrix::template run<R, kAnyRank, !kAnyRank, 4, F, G, M>(bucket, work);
  }
  end_work(bucket, work);
}

// Returns true if a flag is up in any of the tiles [begin, end). All threads of the block call it.
__device__ inline bool any_tile_has(const Bucket& bucket, int flag, int64_t begin, int64_t end) {
  const int32_t* flags = slot_pointer<int32_t>(bucket, 0);
  int seen = 0;
  for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) seen |= flags[i];
  return __syncthreads_or(seen & flag) != 0;
}

// Writes that as 0 or 1 to the P payload.
template <typename F>
__device__ void write_flag(const Bucket& bucket, int flag, int64_t begin, int64_t end,
                           int64_t offset) {
  const bool seen = any_tile_has(bucket, flag, begin, end);
  if (threadIdx.x == 0) static_cast<F*>(bucket.p_payload)[offset] = seen ? F{1} : F{0};
}

// Writes whether any tile of the launch has non-finite elements, and counts the step if one is
// saturated.
template <typename F>
__device__ void finish_step_flags(const Bucket& bucket, int64_t tiles) {
  write_flag<F>(bucket, kNonFinite, 0, tiles, bucket.p_numel - 1);
  if (threadIdx.x == 0) bucket.state->step = begun_step(bucket);
  if (bucket.residual_dtype == DType::kFloat16 && any_tile_has(bucket, kSaturated, 0, tiles) &&
      threadIdx.x == 0)
    count_step(bucket, &StepCounts::saturated);
}

}  // namespace powersgd::kernels::cuda
