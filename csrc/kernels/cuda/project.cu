// SPDX-License-Identifier: BSD-3-Clause
//
// project: M = residual_scale * (memory - p_hat q_local) + G, memory = M, P = M q_warm^T.
//
// The one pass that reads both the gradient and the memory. A tile is a range of rows, and of columns
// where the matrix is very wide. A group of 1 to 8 warps takes four rows at a time and splits their
// columns; a lane takes W columns at a time, four
// neighbours, or one where the addresses do not allow vector accesses:
//   1. load the gradient and the memory, 8 independent vector loads per lane;
//   2. subtract p_hat q_local, add the gradient, store M;
//   3. multiply with q_warm into 4 x rank sums in registers.
// When the columns are done:
//   4. the sums are reduced over the lanes, then over the warps of the group through shared memory.
// A second kernel adds the column ranges' partial sums, and the tiles' flags of non-finite elements.
// P is computed from M as memory holds it, rounded: error feedback then makes up for the rounding too.
#include "elements.cuh"
#include "reduce.cuh"

namespace powersgd::kernels::cuda {
namespace {

constexpr int kRows = kRowsPerWarp;
constexpr int kPlainRanks = 4;  // columns of P at a time in the kernel for any rank

// Registers are traded for blocks in flight.
template <int R, bool kAnyRank>
constexpr int kBlocksPerProcessor = kAnyRank || R > 8 ? 1 : R == 1 ? 3 : 2;

// What a warp works on: pointers to its first row and to the tile's first column. F is the factor
// type, G and M how the gradient and the memory are stored.
template <typename F, typename G, typename M>
struct Rows {
  const G* gradient;
  M* memory;         // null: M is the gradient
  const F* p_hat;    // the first row's
  const F* q_local;
  const F* q_warm;
  int64_t cols, rank;
  int begin, end, step;  // columns of the tile, for this lane
  int count;             // rows that exist, of kRows
  DType gradient_dtype, memory_dtype;
  F scale;

  // A row beyond the last repeats the first, and is not stored.
  __device__ int64_t offset(int row) const { return row < count ? row * cols : 0; }
};

template <int W, typename F>
__device__ __forceinline__ bool replace_non_finite(F (&value)[W]) {
  bool bad = false;
  POWERSGD_UNROLL
  for (int j = 0; j < W; ++j) {
    const bool finite = is_finite(value[j]);
    bad = bad || !finite;
    value[j] = finite ? value[j] : F{0};
  }
  return bad;
}

// m -= p_hat q_local at a lane's columns. p is [R][kRows], of which `rank` rows count.
template <int R, bool kExact, int W, typename F, typename G, typename M>
__device__ __forceinline__ void subtract_last_step(const Rows<F, G, M>& rows, int64_t k0,
                                                   int col, const F* p, F (&m)[kRows][W]) {
  POWERSGD_UNROLL
  for (int k = 0; k < R; ++k) {
    if (!kExact && k0 + k >= rows.rank) continue;
    F q[W];
    load_columns<Access::kReuse>(rows.q_local + (k0 + k) * rows.cols + col, DType::kFloat32, q);
    POWERSGD_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const F factor = p[k * kRows + i];
      POWERSGD_UNROLL
      for (int j = 0; j < W; ++j) m[i][j] -= factor * q[j];
    }
  }
}

// The same for ranks above R, which do not fit into shared memory.
template <int W, typename F, typename G, typename M>
__device__ void subtract_high_rank(const Rows<F, G, M>& rows, int col, F (&m)[kRows][W]) {
  for (int64_t k = 0; k < rows.rank; ++k) {
    F p[kRows];
    POWERSGD_UNROLL
    for (int i = 0; i < kRows; ++i) p[i] = rows.p_hat[(i < rows.count ? i : 0) * rows.rank + k];
    Rows<F, G, M> one = rows;
    one.rank = k + 1;
    subtract_last_step<1, true, W>(one, k, col, p, m);
  }
}

// Phases 1 and 2: M of kRows x 4 elements. True if the gradient held a non-finite one.
template <int R, bool kAnyRank, bool kExact, int W, typename F, typename G, typename M>
__device__ __forceinline__ bool form_m(const Rows<F, G, M>& rows, int col, const F* p,
                                       F (&m)[kRows][W]) {
  F g[kRows][W];
  POWERSGD_UNROLL
  for (int i = 0; i < kRows; ++i)
    load_columns<Access::kStream>(rows.gradient + rows.offset(i) + col, rows.gradient_dtype, g[i]);
  bool bad = false;
  if (rows.memory == nullptr) {
    POWERSGD_UNROLL
    for (int i = 0; i < kRows; ++i) {
      bad = replace_non_finite(g[i]) || bad;
      POWERSGD_UNROLL
      for (int j = 0; j < W; ++j) m[i][j] = g[i][j];
    }
    return bad;
  }
  POWERSGD_UNROLL
  for (int i = 0; i < kRows; ++i)
    load_columns<Access::kStream>(rows.memory + rows.offset(i) + col, rows.memory_dtype, m[i]);
  if constexpr (kAnyRank)
    subtract_high_rank<W>(rows, col, m);
  else
    subtract_last_step<R, kExact, W>(rows, 0, col, p, m);
  const F limit = largest<M>(rows.memory_dtype);
  POWERSGD_UNROLL
  for (int i = 0; i < kRows; ++i) {
    bad = replace_non_finite(g[i]) || bad;
    POWERSGD_UNROLL
    for (int j = 0; j < W; ++j) {
      const F sum = clamp_to(rows.scale * m[i][j] + g[i][j], limit);
      m[i][j] = widen(narrow<M>(sum, rows.memory_dtype), rows.memory_dtype);
    }
    if (i < rows.count)
      store_columns<Access::kReuse>(rows.memory + rows.offset(i) + col, rows.memory_dtype, m[i]);
  }
  return bad;
}

// M again, for the second and further R columns of P of a high rank: a lane reads what it wrote.
template <int W, typename F, typename G, typename M>
__device__ void reload_m(const Rows<F, G, M>& rows, int col, F (&m)[kRows][W]) {
  for (int i = 0; i < kRows; ++i) {
    if (rows.memory != nullptr) {
      load_columns<Access::kReuse>(rows.memory + rows.offset(i) + col, rows.memory_dtype, m[i]);
    } else {
      load_columns<Access::kReuse>(rows.gradient + rows.offset(i) + col, rows.gradient_dtype, m[i]);
      replace_non_finite(m[i]);
    }
  }
}

// Phases 1 to 3 for columns [k0, k0 + R) of P.
template <int R, bool kAnyRank, bool kExact, int W, typename F, typename G, typename M>
__device__ __forceinline__ bool project_rows(Rows<F, G, M> rows, int64_t k0, const F* p,
                                             F (&sums)[kRows * R]) {
  bool bad = false;
  POWERSGD_UNROLL
  for (int i = 0; i < kRows * R; ++i) sums[i] = 0;
POWERSGD_NO_UNROLL
  for (int col = rows.begin; col < rows.end; col += rows.step) {
    F m[kRows][W];
    forget(rows.cols);
    if (!kAnyRank || k0 == 0)
      bad = form_m<R, kAnyRank, kExact, W>(rows, col, p, m) || bad;
    else
      reload_m<W>(rows, col, m);
    POWERSGD_UNROLL
    for (int k = 0; k < R; ++k) {
      if (!kExact && k0 + k >= rows.rank) continue;
      F q[W];
      load_columns<Access::kReuse>(rows.q_warm + (k0 + k) * rows.cols + col, DType::kFloat32, q);
      POWERSGD_UNROLL
      for (int i = 0; i < kRows; ++i) {
        POWERSGD_UNROLL
        for (int j = 0; j < W; ++j) sums[i * R + k] += m[i][j] * q[j];
      }
    }
  }
  return bad;
}

// One tile: passes over its rows, each warp group with four of them.
template <int R, bool kAnyRank, bool kExact, int W, typename F, typename G, typename M>
__device__ __forceinline__ bool project_tile(const Bucket& bucket, const Matrix& matrix,
                                             const Tile& tile, F* out) {
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  const int group_warps = warps_per_group(tile.col_end - tile.col_begin);
  const int group = warp / group_warps;
  const int member = warp % group_warps;
  F* const p = reinterpret_cast<F*>(shared_memory()) + warp * kRows * R;  // [R][kRows]
  F* const partial = reinterpret_cast<F*>(shared_memory()) + kWarps * kRows * R;
  bool bad = false;

  const int tile_rows = static_cast<int>(tile.row_end - tile.row_begin);
  POWERSGD_NO_UNROLL
  for (int pass = 0; pass < tile_rows; pass += kWarps / group_warps * kRows) {
    const int first = pass + group * kRows;
    const int64_t row = tile.row_begin + first;
    const int64_t offset = (first < tile_rows ? row : 0) * matrix.cols + tile.col_begin;
    Rows<F, G, M> rows;
    rows.count = first >= tile_rows ? 0 : tile_rows - first < kRows ? tile_rows - first : kRows;
    rows.gradient = static_cast<const G*>(bucket.gradient) + matrix.gradient_offset + offset;
    rows.memory = matrix.memory == nullptr ? nullptr : global(static_cast<M*>(matrix.memory)) + offset;
    rows.p_hat = global(static_cast<const F*>(matrix.p_hat)) + row * matrix.rank;
    rows.q_local = global(static_cast<const F*>(matrix.q_local)) + tile.col_begin;
    rows.q_warm = global(static_cast<const F*>(matrix.q_warm)) + tile.col_begin;
    rows.cols = matrix.cols;
    rows.rank = matrix.rank;
    rows.begin = (member * kWarpSize + lane) * W;
    rows.end = rows.count > 0 ? static_cast<int>(tile.col_end - tile.col_begin) : 0;
    rows.step = group_warps * kWarpSize * W;
    rows.gradient_dtype = bucket.gradient_dtype;
    rows.memory_dtype = bucket.residual_dtype;
    rows.scale = static_cast<F>(bucket.residual_scale);
    if (!kAnyRank && matrix.memory != nullptr) {
      for (int i = lane; i < kRows * R; i += kWarpSize) {
        const int k = i / kRows;
        p[i] = i % kRows < rows.count && k < matrix.rank
                   ? rows.p_hat[i % kRows * matrix.rank + k]
                   : F{0};
      }
      __syncwarp();
    }
    for (int64_t k0 = 0; k0 < (kAnyRank ? matrix.rank : 1); k0 += R) {
      F sums[kRows * R];
      bad = project_rows<R, kAnyRank, kExact, W>(rows, k0, p, sums) || bad;
      reduce_lanes(sums);
      store_lane_sums(sums, partial + warp * kRows * R);
      __syncthreads();
      for (int i = member * kWarpSize + lane; i < kRows * R; i += group_warps * kWarpSize) {
        F sum = 0;
        for (int w = 0; w < group_warps; ++w)
          sum += partial[(group * group_warps + w) * kRows * R + i];
        if (i / R < rows.count && k0 + i % R < matrix.rank)
          out[(row + i / R) * matrix.rank + k0 + i % R] = sum;
      }
      __syncthreads();
    }
  }
  return bad;
}

// Packs a part of a raw segment into the P payload.
template <typename F, typename G>
__device__ bool pack_raw(const Bucket& bucket, const Tile& tile) {
  const RawSegment segment = bucket.raw_segments[segment_of(tile.item)];
  const G* from = static_cast<const G*>(bucket.gradient) + segment.gradient_offset;
  F* to = factor_pointer<F>(bucket.p_payload, segment.p_offset);
  bool bad = false;
  for (int64_t i = tile.col_begin + threadIdx.x; i < tile.col_end; i += kThreads) {
    const F value = widen(from[i], bucket.gradient_dtype);
    const bool finite = is_finite(value);
    bad = bad || !finite;
    to[i] = finite ? value : F{0};
  }
  return bad;
}

template <int R, bool kAnyRank, typename F, typename G, typename M>
__global__ void __launch_bounds__(kThreads, (kBlocksPerProcessor<R, kAnyRank>))
    project_kernel(Bucket bucket, int64_t first_tile) {
  begin_kernel();
  // By reference: what a tile needs again is in the cache, and registers are scarce.
  const Tile& tile = global(bucket.tiles)[first_tile + blockIdx.x];
  bool bad;
  if (tile.item < 0) {
    bad = pack_raw<F, G>(bucket, tile);
  } else {
    const Matrix& matrix = global(bucket.matrices)[tile.item];
    F* out = factor_pointer<F>(bucket.p_payload, matrix.p_offset);
    if (matrix.cols > kSplitColumns)
      out = slot_pointer<F>(bucket, tile.slot + tile.col_begin / kSplitColumns *
                                                   slots(matrix.rows * matrix.rank * sizeof(F)));
    const G* gradient = static_cast<const G*>(bucket.gradient) + matrix.gradient_offset;
    const bool aligned = is_aligned(gradient, matrix.cols) &&
                         is_aligned(static_cast<const M*>(matrix.memory), matrix.cols) &&
                         is_aligned(static_cast<const F*>(matrix.q_local), matrix.cols) &&
                         is_aligned(static_cast<const F*>(matrix.q_warm), matrix.cols);
    if (!aligned)
      bad = project_tile<R, kAnyRank, false, 1, F, G, M>(bucket, matrix, tile, out);
    else if (kAnyRank || matrix.rank < R)
      bad = project_tile<R, kAnyRank, false, 4, F, G, M>(bucket, matrix, tile, out);
    else
      bad = project_tile<R, kAnyRank, !kAnyRank, 4, F, G, M>(bucket, matrix, tile, out);
  }
  const int any = __syncthreads_or(bad);
  if (threadIdx.x == 0) slot_pointer<int32_t>(bucket, 0)[blockIdx.x] = any;
}

// Block 0: the count of the payload, 1 if any tile met a non-finite element. The others: one row
// range each of a matrix that was projected in column ranges.
template <typename F>
__global__ void __launch_bounds__(kThreads)
    finish_kernel(Bucket bucket, int64_t flags, int64_t first_tile) {
  begin_kernel();
  if (blockIdx.x == 0) {
    const int32_t* flag = slot_pointer<int32_t>(bucket, 0);
    int bad = 0;
    for (int64_t i = threadIdx.x; i < flags; i += kThreads) bad |= flag[i];
    bad = __syncthreads_or(bad);
    if (threadIdx.x == 0)
      static_cast<F*>(bucket.p_payload)[bucket.p_numel - 1] = bad != 0 ? F{1} : F{0};
    return;
  }
  const Tile tile = bucket.tiles[first_tile + blockIdx.x - 1];
  const Matrix matrix = bucket.matrices[tile.item];
  const int64_t stride = slots(matrix.rows * matrix.rank * sizeof(F)) * (kSlotBytes / sizeof(F));
  const F* partial = slot_pointer<F>(bucket, tile.slot);
  F* p = factor_pointer<F>(bucket.p_payload, matrix.p_offset);
  for (int64_t i = tile.row_begin * matrix.rank + threadIdx.x; i < tile.row_end * matrix.rank;
       i += kThreads) {
    F sum = 0;
    for (int64_t range = 0; range < ceil_div(matrix.cols, kSplitColumns); ++range)
      sum += partial[range * stride + i];
    p[i] = sum;
  }
}

template <int R, bool kAnyRank, typename F, typename G, typename M>
Status launch_project(const Bucket& bucket, Stream stream) {
  const int64_t* begin = bucket.tile_list_begin.data();
  const int64_t tiles = begin[kProjectTiles + 1] - begin[kProjectTiles];
  const int64_t sums = begin[kProjectSums + 1] - begin[kProjectSums];
  const size_t shared = 2 * kWarps * kRows * R * sizeof(F);
  if (const Status status = launch(project_kernel<R, kAnyRank, F, G, M>, tiles, kThreads, shared, stream,
                                   bucket, begin[kProjectTiles]);
      status != 0)
    return status;
  return launch(finish_kernel<F>, 1 + sums, kThreads, 0, stream, bucket, tiles,
                begin[kProjectSums]);
}

template <typename G, typename M>
Status dispatch_rank(const Bucket& bucket, Stream stream) {
  switch (bucket.tile_list_begin[kRankClass + 1] - bucket.tile_list_begin[kRankClass]) {
    case 0: return launch_project<1, false, float, G, M>(bucket, stream);
    case 1: return launch_project<2, false, float, G, M>(bucket, stream);
    case 2: return launch_project<4, false, float, G, M>(bucket, stream);
    case 3: return launch_project<8, false, float, G, M>(bucket, stream);
    case 4: return launch_project<16, false, float, G, M>(bucket, stream);
    case 5: return launch_project<32, false, float, G, M>(bucket, stream);
    default: return launch_project<kPlainRanks, true, float, G, M>(bucket, stream);
  }
}

}  // namespace

Status project(const Bucket& bucket, Stream stream) {
  if (bucket.factor_dtype == DType::kFloat64)
    return launch_project<kPlainRanks, true, double, double, double>(bucket, stream);
  const bool wide_gradient = bucket.gradient_dtype == DType::kFloat32;
  const bool wide_memory = bucket.residual_dtype == DType::kFloat32;
  if (wide_gradient)
    return wide_memory ? dispatch_rank<float, float>(bucket, stream)
                       : dispatch_rank<float, uint16_t>(bucket, stream);
  return wide_memory ? dispatch_rank<uint16_t, float>(bucket, stream)
                     : dispatch_rank<uint16_t, uint16_t>(bucket, stream);
}

}  // namespace powersgd::kernels::cuda
