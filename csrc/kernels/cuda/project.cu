// SPDX-License-Identifier: BSD-3-Clause
//
// project: M = residual_scale * (memory - p_hat q_local) + G, memory = M, P = M q_warm^T.
//
// The one pass that reads both the gradient and the memory. A tile is a range of rows, and of
// columns where the matrix is very wide. A group of 1 to 8 warps takes four rows at a time and
// splits their columns; a lane takes W columns at a time, four neighbours, or one where the
// addresses do not allow vector accesses:
//   1. load the gradient and the memory, 8 independent vector loads per lane;
//   2. add the gradient, subtract p_hat q_local, store M;
//   3. multiply with q_warm into 4 x rank sums in registers.
// When the columns are done:
//   4. the sums are reduced over the lanes, then over the warps of the group through shared memory.
// A second kernel adds the column ranges' partial sums, and the tiles' flags of non-finite
// elements. P is computed from M as memory holds it, rounded: error feedback then makes up for the
// rounding too.
#include "elements.cuh"
#include "reduce.cuh"

namespace powersgd::kernels::cuda {
namespace {

constexpr int kRows = kRowsPerWarp;
constexpr int kPlainRanks = 4;  // columns of P at a time in the kernel for any rank

// Registers are traded for blocks in flight.
template <int R, bool kAnyRank>
constexpr int kBlocksPerProcessor = kAnyRank || R > 8 ? 1 : 2;

// What a block works on, at the start of shared memory: registers are scarce.
struct alignas(16) Work {
  Tile tile;
  Matrix matrix;
  int non_finite;  // set by whoever meets such an element: they all write the same
};

// p_hat's rows and the sums, for each warp, follow.
template <int R, typename F>
constexpr size_t kSharedBytes = sizeof(Work) + 2 * kWarps * kRows * R * sizeof(F);

// What a warp works on: pointers to its first row and to the tile's first column. F is the factor
// type, G and M how the gradient and the memory are stored.
template <typename F, typename G, typename M>
struct Rows {
  const G* gradient;
  M* memory;       // null: M is the gradient
  const F* p_hat;  // the first row's
  const F* q_local;
  const F* q_warm;
  int64_t cols;
  int rank;
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

// m -= scale p_hat q_local at a lane's columns. p is scale p_hat as [R][kRows], of which `rank`
// rows count.
template <int R, bool kExact, int W, typename F, typename G, typename M>
__device__ __forceinline__ void subtract_last_step(const Rows<F, G, M>& rows, int k0, int col,
                                                   const F* p, F (&m)[kRows][W]) {
  // More would be loaded at once, for want of registers elsewhere.
  POWERSGD_UNROLL_4
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
  for (int k = 0; k < rows.rank; ++k) {
    F p[kRows];
    POWERSGD_UNROLL
    for (int i = 0; i < kRows; ++i)
      p[i] = rows.scale * rows.p_hat[(i < rows.count ? i : 0) * int64_t{rows.rank} + k];
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
  // With the gradient added first, its registers are free for the factors.
  POWERSGD_UNROLL
  for (int i = 0; i < kRows; ++i) {
    bad = replace_non_finite(g[i]) || bad;
    POWERSGD_UNROLL
    for (int j = 0; j < W; ++j) m[i][j] = rows.scale * m[i][j] + g[i][j];
  }
  if constexpr (kAnyRank)
    subtract_high_rank<W>(rows, col, m);
  else
    subtract_last_step<R, kExact, W>(rows, 0, col, p, m);
  const F limit = largest<M>(rows.memory_dtype);
  POWERSGD_UNROLL
  for (int i = 0; i < kRows; ++i) {
    POWERSGD_UNROLL
    for (int j = 0; j < W; ++j)
      m[i][j] = widen(narrow<M>(clamp_to(m[i][j], limit), rows.memory_dtype), rows.memory_dtype);
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
__device__ __forceinline__ bool project_rows(Rows<F, G, M> rows, int k0, const F* p,
                                             F (&sums)[kRows * R]) {
  bool bad = false;
  int start = 0;
  POWERSGD_UNROLL
  for (int i = 0; i < kRows * R; ++i) sums[i] = 0;
  POWERSGD_NO_UNROLL
  for (int col = rows.begin; col < rows.end; col += rows.step) {
    F m[kRows][W];
    forget(rows.cols);
    forget(start);
    if (!kAnyRank || k0 == 0)
      bad = form_m<R, kAnyRank, kExact, W>(rows, col, p + start, m) || bad;
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

// Where a tile's part of P goes.
template <typename F>
__device__ __forceinline__ F* output(const Bucket& bucket, const Work& work) {
  const Matrix& matrix = work.matrix;
  if (matrix.cols <= kSplitColumns)
    return global(factor_pointer<F>(bucket.p_payload, matrix.p_offset));
  const int64_t stride = slots(matrix.rows * matrix.rank * int64_t{sizeof(F)});
  return global(
      slot_pointer<F>(bucket, work.tile.slot + work.tile.col_begin / kSplitColumns * stride));
}

// One tile: passes over its rows, each warp group with four of them.
template <int R, bool kAnyRank, bool kExact, int W, typename F, typename G, typename M>
__device__ __forceinline__ void project_tile(const Bucket& bucket, Work* work) {
  const Tile& tile = work->tile;
  const Matrix& matrix = work->matrix;
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  const int group_warps = warps_per_group(tile.col_end - tile.col_begin);
  const int group = warp / group_warps;
  const int member = warp % group_warps;
  F* const factors = reinterpret_cast<F*>(work + 1);  // [kWarps][R][kRows]
  F* const partial = factors + kWarps * kRows * R;    // [kWarps][kRows][R]
  F* const p = factors + warp * kRows * R;
  const int tile_rows = static_cast<int>(tile.row_end - tile.row_begin);
  POWERSGD_NO_UNROLL
  for (int pass = 0; pass < tile_rows; pass += kWarps / group_warps * kRows) {
    const int first = pass + group * kRows;
    const int64_t row = tile.row_begin + first;
    const int64_t offset = (first < tile_rows ? row : 0) * matrix.cols + tile.col_begin;
    Rows<F, G, M> rows;
    rows.count = first >= tile_rows ? 0 : tile_rows - first < kRows ? tile_rows - first : kRows;
    rows.gradient = static_cast<const G*>(bucket.gradient) + matrix.gradient_offset + offset;
    rows.memory =
        global(matrix.memory == nullptr ? nullptr : static_cast<M*>(matrix.memory) + offset);
    rows.p_hat = global(static_cast<const F*>(matrix.p_hat)) + row * matrix.rank;
    rows.q_local = global(static_cast<const F*>(matrix.q_local)) + tile.col_begin;
    rows.q_warm = global(static_cast<const F*>(matrix.q_warm)) + tile.col_begin;
    rows.cols = matrix.cols;
    rows.rank = static_cast<int>(matrix.rank);
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
                   ? rows.scale * rows.p_hat[i % kRows * matrix.rank + k]
                   : F{0};
      }
      __syncwarp();
    }
    for (int k0 = 0; k0 < (kAnyRank ? matrix.rank : 1); k0 += R) {
      F sums[kRows * R];
      if (project_rows<R, kAnyRank, kExact, W>(rows, k0, p, sums)) work->non_finite = 1;
      reduce_lanes(sums);
      store_lane_sums(sums, partial + warp * kRows * R);
      __syncthreads();
      F* const out = output<F>(bucket, *work);
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
}

// Packs a part of a raw segment into the P payload.
template <typename F, typename G>
__device__ void pack_raw(const Bucket& bucket, Work* work) {
  const Tile& tile = work->tile;
  const RawSegment segment = bucket.raw_segments[segment_of(tile.item)];
  const G* from = static_cast<const G*>(bucket.gradient) + segment.gradient_offset;
  F* to = factor_pointer<F>(bucket.p_payload, segment.p_offset);
  for (int64_t i = tile.col_begin + threadIdx.x; i < tile.col_end; i += kThreads) {
    const F value = widen(from[i], bucket.gradient_dtype);
    const bool finite = is_finite(value);
    to[i] = finite ? value : F{0};
    if (!finite) work->non_finite = 1;
  }
}

template <int R, bool kAnyRank, typename F, typename G, typename M>
__global__ void __launch_bounds__(kThreads, (kBlocksPerProcessor<R, kAnyRank>))
    project_kernel(Bucket bucket, int64_t first_tile) {
  begin_kernel();
  Work* const work = reinterpret_cast<Work*>(shared_memory());
  if (threadIdx.x == 0) {
    work->tile = bucket.tiles[first_tile + blockIdx.x];
    if (work->tile.item >= 0) work->matrix = bucket.matrices[work->tile.item];
    work->non_finite = 0;
  }
  __syncthreads();
  if (work->tile.item < 0) {
    pack_raw<F, G>(bucket, work);
  } else {
    const Matrix& matrix = work->matrix;
    const bool aligned =
        is_aligned(static_cast<const G*>(bucket.gradient) + matrix.gradient_offset, matrix.cols) &&
        is_aligned(static_cast<const M*>(matrix.memory), matrix.cols) &&
        is_aligned(static_cast<const F*>(matrix.q_local), matrix.cols) &&
        is_aligned(static_cast<const F*>(matrix.q_warm), matrix.cols);
    if (!aligned)
      project_tile<R, kAnyRank, false, 1, F, G, M>(bucket, work);
    else if (kAnyRank || (R > 1 && matrix.rank < R))
      project_tile<R, kAnyRank, false, 4, F, G, M>(bucket, work);
    else
      project_tile<R, kAnyRank, !kAnyRank, 4, F, G, M>(bucket, work);
  }
  __syncthreads();
  if (threadIdx.x == 0) slot_pointer<int32_t>(bucket, 0)[blockIdx.x] = work->non_finite;
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
  if (const Status status = launch(project_kernel<R, kAnyRank, F, G, M>, tiles, kThreads,
                                   kSharedBytes<R, F>, stream, bucket, begin[kProjectTiles]);
      status != 0)
    return status;
  return launch(finish_kernel<F>, 1 + sums, kThreads, 0, stream, bucket, tiles,
                begin[kProjectSums]);
}

template <typename G, typename M>
Status dispatch_rank(const Bucket& bucket, Stream stream) {
  switch (bucket.tile_list_begin[kRankClass + 1] - bucket.tile_list_begin[kRankClass]) {
    case 0:
      return launch_project<1, false, float, G, M>(bucket, stream);
    case 1:
      return launch_project<2, false, float, G, M>(bucket, stream);
    case 2:
      return launch_project<4, false, float, G, M>(bucket, stream);
    case 3:
      return launch_project<8, false, float, G, M>(bucket, stream);
    case 4:
      return launch_project<16, false, float, G, M>(bucket, stream);
    case 5:
      return launch_project<32, false, float, G, M>(bucket, stream);
    default:
      return launch_project<kPlainRanks, true, float, G, M>(bucket, stream);
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
