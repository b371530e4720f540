// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "kernels/cuda/reconstruct_staging.cuh"

// A tile of a gradient above rank 8. A warp takes eight rows at a time, and a lane four columns,
// with the sums in registers. For four ranks it loads Q's columns once and each row of p_hat.

namespace powersgd::kernels::cuda {

// Groups of four elements that a thread copies to shared memory at a time. It loads them before the
// block waits, and stores them after that, so that the loads and the wait overlap.
template <int R>
constexpr int kGroupsOfP = kStagedRows<R> * R / 4 / kThreads;
template <int R>
constexpr int kGroupsOfQ = R / kWarps;

// p_hat at `rows` rows from `begin` on, with zeros beyond.
template <int R>
__device__ __forceinline__ void load_p(const Matrix& matrix, int64_t begin, int rows,
                                       float (&out)[kGroupsOfP<R>][4]) {
  constexpr int kGroups = R / 4;  // of a row
  const float* const p_hat = global(static_cast<const float*>(matrix.p_hat)) + begin * matrix.rank;
  const bool aligned = is_aligned(static_cast<const float*>(matrix.p_hat), matrix.rank);
  const int ranks = static_cast<int>(matrix.rank);
  int thread = static_cast<int>(threadIdx.x);
  hide_from_optimizer(thread);
  POWERSGD_UNROLL
  for (int n = 0; n < kGroupsOfP<R>; ++n) {
    const unsigned i = static_cast<unsigned>(thread + n * kThreads);
    const int row = static_cast<int>(i / kGroups), k = static_cast<int>(i % kGroups) * 4;
    POWERSGD_UNROLL
    for (int j = 0; j < 4; ++j) out[n][j] = 0;
    if (row < rows && k < ranks)
      load_columns<Access::kReuse>(p_hat + row * matrix.rank + k, LaneColumns{aligned, ranks - k},
                                   DType::kFloat32, out[n]);
  }
}

// Q at the lane's columns from `q` on. Beyond the rank it is -0, as a product of 0 and -0 leaves
// any sum as it is, even -0.
template <int R>
__device__ __forceinline__ void load_q(const float* q, const Matrix& matrix,
                                       const LaneColumns& columns, float (&out)[kGroupsOfQ<R>][4]) {
  int warp = warp_id();
  hide_from_optimizer(warp);
  int64_t k = warp;
  const float* row = q + k * matrix.cols;
  POWERSGD_UNROLL
  for (int n = 0; n < kGroupsOfQ<R>; ++n) {
    POWERSGD_UNROLL
    for (int j = 0; j < 4; ++j) out[n][j] = -0.0f;
    if (columns.count > 0 && k < matrix.rank)
      load_columns<Access::kReuse>(row, columns, DType::kFloat32, out[n]);
    k += kWarps;
    row += kWarps * matrix.cols;
  }
}

// Stores the groups, times `scale`, where a thread has its groups.
template <int N>
__device__ __forceinline__ void stage_groups(const float (&groups)[N][4], float scale,
                                             float* staged) {
  POWERSGD_UNROLL
  for (int n = 0; n < N; ++n) {
    float scaled[4];
    POWERSGD_UNROLL
    for (int j = 0; j < 4; ++j) scaled[j] = scale * groups[n][j];
    store_stored<Access::kShared>(staged + (static_cast<int>(threadIdx.x) + n * kThreads) * 4,
                                  scaled);
  }
}

// Copies p_hat at the tile's rows from `begin` on, and at first Q, to shared memory. Returns true,
// and has copied nothing, if `await` does.
template <int R, typename Await>
__device__ __forceinline__ bool stage_ranks(const Bucket& bucket, const Matrix& matrix,
                                            const Tile& tile, const StripColumns& lane, int begin,
                                            const Await& await) {
  float p_groups[kGroupsOfP<R>][4], q_groups[kGroupsOfQ<R>][4];
  load_p<R>(matrix, tile.row_begin + begin, rows_from(tile, tile.row_begin + begin, kStagedRows<R>),
            p_groups);
  const float* const q = q_payload(bucket) + matrix.q_offset;
  LaneColumns columns = lane.of(q, matrix);
  if (begin > 0) columns.count = 0;
  load_q<R>(q + lane.first, matrix, columns, q_groups);
  const float scale = scale_of_p(bucket, matrix);
  if (await()) return true;
  __syncthreads();
  stage_groups(p_groups, scale, staged_p());
  if (begin == 0) stage_groups(q_groups, 1.0f, staged_q<R>());
  __syncthreads();
  return false;
}

// sum += p Q, at a warp's rows and a lane's columns. More than four ranks at a time would need more
// registers than three blocks have.
template <int R>
__device__ __forceinline__ void add_ranks(const float* p, const float* q, int ranks,
                                          float (&sum)[kRowsOfWarp][4]) {
  POWERSGD_NO_UNROLL
  for (const float* const end = p + ranks; p < end; p += 4) {
    float factor[4][4];
    POWERSGD_UNROLL
    for (int k = 0; k < 4; ++k) {
      load_stored<Access::kShared>(q, factor[k]);
      q += kStrip;
    }
    POWERSGD_UNROLL
    for (int i = 0; i < kRowsOfWarp; ++i) {
      float p_row[4];
      load_stored<Access::kShared>(p + i * R, p_row);
      POWERSGD_UNROLL
      for (int k = 0; k < 4; ++k) {
        POWERSGD_UNROLL
        for (int j = 0; j < 4; ++j) sum[i][j] += p_row[k] * factor[k][j];
      }
    }
  }
}

// Stores the first `rows` of a warp's rows, which lie `stride` apart.
template <typename G>
__device__ __forceinline__ void store_rows(G* out, int64_t stride, int rows,
                                           const LaneColumns& columns, DType dtype,
                                           const float (&sum)[kRowsOfWarp][4]) {
  POWERSGD_UNROLL
  for (int i = 0; i < kRowsOfWarp; ++i) {
    if (i < rows) store_columns<Access::kNonTemporal>(out, columns, dtype, sum[i]);
    out += stride;
  }
}

template <int R, typename G, typename AwaitChecks>
__device__ __forceinline__ bool reconstruct_high_rank(const Bucket& bucket, const Matrix& matrix,
                                                      const Tile& tile, G* gradient,
                                                      const AwaitChecks& await_checks) {
  const StripColumns lane(gradient, matrix, tile);
  if (stage_ranks<R>(bucket, matrix, tile, lane, 0, await_checks)) return true;
  const LaneColumns& columns = lane.columns;
  const int first = warp_id() * kRowsOfWarp;
  const int tile_rows = static_cast<int>(tile.row_end - tile.row_begin);
  for (int begin = 0; begin < tile_rows; begin += kRowsOfBlock) {
    const int staged_row = begin % kStagedRows<R>;
    const int rows = tile_rows - begin - first;  // may exceed kRowsOfWarp
    float sum[kRowsOfWarp][4] = {};
    if (staged_row == 0 && begin > 0)
      stage_ranks<R>(bucket, matrix, tile, lane, begin, [] { return false; });
    if (columns.count > 0 && rows > 0)
      add_ranks<R>(staged_p() + (staged_row + first) * R, staged_q<R>() + lane_id() * 4,
                   static_cast<int>(matrix.rank), sum);
    if (columns.count <= 0) continue;
    int row = first;
    hide_from_optimizer(row);
    G* const out = gradient + (tile.row_begin + begin + row) * matrix.cols + lane.first;
    if (columns.aligned)
      store_rows(out, matrix.cols, rows, LaneColumns{true, 4}, bucket.gradient_dtype, sum);
    else
      store_rows(out, matrix.cols, rows, LaneColumns{false, columns.count, kWarpSize},
                 bucket.gradient_dtype, sum);
  }
  return false;
}

}  // namespace powersgd::kernels::cuda
