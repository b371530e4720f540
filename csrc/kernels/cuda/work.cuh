// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "kernels/cuda/grid.cuh"
#include "kernels/cuda/payload.cuh"
#include "kernels/shared/steps.h"

// The work of a block of project besides its products: it reads its tile, packs raw segments, notes
// what the gradient's elements are like, and writes that to the P payload.

namespace powersgd::kernels::cuda {

// The tile of a block, at the start of shared memory.
struct alignas(16) Work {
  Tile tile;
  Matrix matrix;  // that the tile is a part of, unless it is one of a raw segment
  float scale;    // of the residual, see share_residual_scale
  // 1 if the block has found a non-finite element of the gradient. Several threads may set it at a
  // time. It lies here because registers are scarce.
  volatile int non_finite;
};

// A table's entry is copied by as many threads as it has words, all of whose loads are in flight at
// once.
using Word = uint64_t __attribute__((may_alias));
template <typename Entry>
__device__ __forceinline__ void copy_entry(const Entry& from, Entry& to) {
  static_assert(sizeof(Entry) % sizeof(Word) == 0 && sizeof(Entry) / sizeof(Word) <= kWarpSize);
  if (threadIdx.x < sizeof(Entry) / sizeof(Word))
    reinterpret_cast<Word*>(&to)[threadIdx.x] = reinterpret_cast<const Word*>(&from)[threadIdx.x];
}

// All threads of the block call this.
__device__ __forceinline__ Work* begin_work(const Bucket& bucket, const Tile* tiles) {
  Work* const work = reinterpret_cast<Work*>(shared_memory());
  if (threadIdx.x < kWarpSize) {
    const Tile& tile = tiles[blockIdx.x];
    static_assert(offsetof(Tile, kind) == 0 && offsetof(Tile, item) == sizeof(Word) / 2);
    const Word kind_and_item = reinterpret_cast<const Word&>(tile);  // by one load
    copy_entry(tile, work->tile);
    if (static_cast<TileKind>(static_cast<uint32_t>(kind_and_item)) != TileKind::kRawSegment)
      copy_entry(bucket.matrices[kind_and_item >> 32], work->matrix);
    if (threadIdx.x == 0) work->non_finite = 0;
  }
  __syncthreads();
  return work;
}

// One thread divides, because a division in double takes a hundred instructions. All threads of the
// block call this.
__device__ __forceinline__ void share_residual_scale(const Bucket& bucket, Work* work) {
  if (threadIdx.x == 0) {
    work->scale = static_cast<float>(residual_scale(bucket, work->matrix));
  }
  __syncthreads();
}

// Adds the flag of the block to that of its matrix, or of all raw segments.
__device__ __forceinline__ void add_flag(const Bucket& bucket, const Work& work) {
  __syncthreads();
  if (threadIdx.x != 0 || work.non_finite == 0) return;
  const int64_t counter = work.tile.kind == TileKind::kRawSegment
                              ? raw_flag_counter(bucket.num_matrices)
                              : flag_counter(work.tile.item);
  atomicOr(reinterpret_cast<int*>(bucket.counters + counter), 1);
}

// Takes the flags of all blocks, writes what they say to the P payload alongside the uses, and
// notes the units of memory. The last block of project calls it.
__device__ inline void write_flags(const Bucket& bucket) {
  float* const p = p_payload(bucket);
  int32_t found = 0;
  for (int item = threadIdx.x; item <= bucket.num_matrices; item += kThreads) {
    auto* const flag = reinterpret_cast<int32_t*>(bucket.counters + flag_counter(item));
    found |= *flag;
    if (item < bucket.num_matrices && bucket.matrices[item].use_offset >= 0)
      p[bucket.matrices[item].use_offset] = static_cast<float>(use_of(bucket, item));
    *flag = 0;
    if (item < bucket.num_matrices && bucket.matrices[item].memory_units != nullptr)
      *bucket.matrices[item].memory_units = units_of(bucket);
  }
  const bool non_finite = __syncthreads_or(found) != 0;
  if (threadIdx.x != 0) return;
  p[bucket.p_numel - 1] = non_finite ? 1 : 0;
  bucket.state->step = begun_step(bucket);
}

// Packs a part of a raw segment into the P payload.
template <typename G>
__device__ void pack_raw(const Bucket& bucket, Work* work) {
  const Tile& tile = work->tile;
  const RawSegment segment = bucket.raw_segments[tile.item];
  const G* from = static_cast<const G*>(bucket.gradient) + segment.gradient_offset;
  float* const to = p_payload(bucket) + segment.p_offset;
  for (int64_t i = tile.col_begin + threadIdx.x; i < tile.col_end; i += kThreads) {
    const float value = widen(from[i], bucket.gradient_dtype);
    if (!is_finite(value)) work->non_finite = 1;
    to[i] = value;
  }
}

}  // namespace powersgd::kernels::cuda
