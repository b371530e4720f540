// SPDX-License-Identifier: BSD-3-Clause
//
// project: M = G + residual_scale * (memory - p_hat q_local), memory = M, P = M q_warm^T.
//
// The one pass that reads both the gradient and the memory. A tile walks its columns in blocks; for
// every kRows rows of a block,
//   1. p_hat q_local is multiplied out into a buffer in the L1 cache,
//   2. the buffer becomes M: the only step that loads and stores the types of gradient and memory,
//   3. the buffer is multiplied with q_warm.
// P is computed from M as memory holds it, rounded: error feedback then makes up for the rounding.
#include "blocks.h"
#include "convert.h"

namespace powersgd::kernels::cpu {
namespace {

// Adds NaN to `poison` where an element is not finite, and takes that element as 0.
template <class Arch, class G>
POWERSGD_INLINE Vector<Arch, ComputeOf<G>> load_finite(const G* gradient,
                                                       Vector<Arch, ComputeOf<G>>& poison) {
  const Vector<Arch, ComputeOf<G>> zero = {};
  const Vector<Arch, ComputeOf<G>> g = load_as<Arch, G>(gradient);
  const Vector<Arch, ComputeOf<G>> zero_or_nan = g - g;
  poison += zero_or_nan;
  return zero_or_nan == zero ? g : zero;
}

// One vector of M. `block` holds p_hat q_local and becomes M as it is stored. The clamp keeps memory
// finite where the sum is out of its range: an infinity would never leave it.
template <class Arch, class G, class R>
POWERSGD_INLINE void combine(const G* gradient, R* memory, ComputeOf<G> residual_scale,
                             ComputeOf<G>* block, Vector<Arch, ComputeOf<G>>& poison) {
  using V = Vector<Arch, ComputeOf<G>>;
  const V error = residual_scale * (load_as<Arch, R>(memory) - load<Arch>(block));
  const V sum = clamped_to<R>(error + load_finite<Arch>(gradient, poison));
  store_as<Arch>(memory, sum);
  store<Arch>(block, rounded_to<Arch, R>(sum));
}

template <class F, size_t kBytes>
POWERSGD_INLINE bool is_poisoned(const typename VectorOf<F, kBytes>::Type& poison) {
  return !(sum_of_lanes<F, kBytes>(poison) == 0);
}

template <class G, class R>
struct ProjectTile {
  using F = ComputeOf<G>;

  const Bucket& bucket;
  const Matrix& matrix;
  const Tile& tile;

  template <class Arch>
  POWERSGD_INLINE void run() const {
    PackedFactor<F> local(matrix.q_local, matrix.cols);
    PackedFactor<F> warm(matrix.q_warm, matrix.cols);
    Vector<Arch, F> poison = {};
    const int64_t width = block_cols(matrix.rank);
    const int64_t height = BAND;
    for (int64_t band = tile.row_begin; band < tile.row_end; band += height) {
      const int64_t band_end = std::min(band + height, tile.row_end);
      int64_t ahead = band_end * matrix.cols;
      for (int64_t col = 0; col < matrix.cols; col += width) {
        const int64_t cols = std::min(width, matrix.cols - col);
        for (int64_t row = band; row < band_end; row += kRows) {
          const int64_t rows = std::min<int64_t>(kRows, band_end - row);
          alignas(64) F block[kRows * kMaxBlockCols];
          if (matrix.memory != nullptr) multiply_last<Arch>(row, rows, col, cols, local, block);
          combine_rows<Arch>(row, rows, col, cols, ahead, block, poison);
          multiply_warm<Arch>(row, rows, col, cols, block, warm);
        }
      }
    }
    *slot_pointer<int32_t>(bucket, tile.slot) = is_poisoned<F, Arch::kVectorBytes>(poison);
  }

  // block = p_hat q_local
  template <class Arch>
  POWERSGD_INLINE void multiply_last(int64_t row, int64_t rows, int64_t col, int64_t cols,
                                     PackedFactor<F>& local, F* block) const {
    const F* p_hat = static_cast<const F*>(matrix.p_hat) + row * matrix.rank;
    alignas(64) F left[kRows * kPackedRank];
    for (int64_t k = 0; k == 0 || k < matrix.rank; k += kPackedRank) {
      const int64_t count = std::min<int64_t>(kPackedRank, matrix.rank - k);
      local.pack(k, count, col, cols);
      pack_rows(p_hat + k, matrix.rank, rows, count, left);
      multiply<Arch, F>(left, local.data(), local.stride(), count, local.stride(), k > 0, block,
                        local.stride());
    }
  }

  // block = M, and so does memory
  template <class Arch>
  POWERSGD_INLINE void combine_rows(int64_t row, int64_t rows, int64_t col, int64_t cols, int64_t& ahead, F* block,
                                    Vector<Arch, F>& poison) const {
    const int64_t stride = round_up(cols, kPad);
    const int64_t offset = row * matrix.cols + col;
    const G* gradient = elements<G>(bucket.gradient, matrix.gradient_offset) + offset;
    R* memory = static_cast<R*>(matrix.memory) + (matrix.memory == nullptr ? 0 : offset);
    for (int64_t i = 0; i < rows; ++i) {
      if (matrix.memory == nullptr) {
        copy_row<Arch>(gradient + i * matrix.cols, cols, block + i * stride, poison);
      } else {
        combine_row<Arch>(gradient + i * matrix.cols, memory + i * matrix.cols, cols,
                          ahead - offset - i * matrix.cols, block + i * stride, poison);
        ahead += cols;
      }
    }
    std::fill(block + rows * stride, block + kRows * stride, F{0});
  }

  template <class Arch>
  POWERSGD_INLINE void combine_row(const G* gradient, R* memory, int64_t cols, int64_t ahead, F* block,
                                   Vector<Arch, F>& poison) const {
    constexpr int64_t kLane = kLanes<Arch, F>;
    const F scale = static_cast<F>(bucket.residual_scale);
    int64_t j = 0;
    for (; j + kLane <= cols; j += kLane) {
      if (PF) {
      __builtin_prefetch(gradient + j + ahead, 0, PF);
      __builtin_prefetch(memory + j + ahead, 0, PF);
      }
      combine<Arch>(gradient + j, memory + j, scale, block + j, poison);
    }
    if (j < cols) {
      Padded<Arch, G> last_gradient(gradient + j, cols - j);
      Padded<Arch, R> last_memory(memory + j, cols - j);
      combine<Arch>(last_gradient.data, last_memory.data, scale, block + j, poison);
      std::copy_n(last_memory.data, cols - j, memory + j);
      j += kLane;
    }
    std::fill(block + j, block + round_up(cols, kPad), F{0});
  }

  template <class Arch>
  POWERSGD_INLINE void copy_row(const G* gradient, int64_t cols, F* block,
                                Vector<Arch, F>& poison) const {
    constexpr int64_t kLane = kLanes<Arch, F>;
    int64_t j = 0;
    for (; j + kLane <= cols; j += kLane) {
      store<Arch>(block + j, load_finite<Arch>(gradient + j, poison));
    }
    if (j < cols) {
      const Padded<Arch, G> last(gradient + j, cols - j);
      store<Arch>(block + j, load_finite<Arch>(last.data, poison));
      j += kLane;
    }
    std::fill(block + j, block + round_up(cols, kPad), F{0});
  }

  // P += block q_warm^T
  template <class Arch>
  POWERSGD_INLINE void multiply_warm(int64_t row, int64_t rows, int64_t col, int64_t cols,
                                     const F* block, PackedFactor<F>& warm) const {
    F* p = elements<F>(bucket.p_payload, matrix.p_offset) + row * matrix.rank;
    alignas(64) F sums[kRows * kPackedRank];
    for (int64_t k = 0; k < matrix.rank; k += kPackedRank) {
      const int64_t count = std::min<int64_t>(kPackedRank, matrix.rank - k);
      warm.pack(k, count, col, cols);
      dot<Arch, F>(block, warm.stride(), warm.data(), warm.stride(), count, warm.stride(), sums);
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t n = 0; n < count; ++n) {
          F& target = p[i * matrix.rank + k + n];
          target = (col == 0 ? F{0} : target) + sums[n * kRows + i];
        }
      }
    }
  }
};

// A raw segment travels as it is.
template <class G>
struct CopyRawTile {
  using F = ComputeOf<G>;

  const Bucket& bucket;
  const RawSegment& raw;
  const Tile& tile;

  template <class Arch>
  POWERSGD_INLINE void run() const {
    constexpr int64_t kLane = kLanes<Arch, F>;
    const G* gradient = elements<G>(bucket.gradient, raw.gradient_offset);
    F* payload = elements<F>(bucket.p_payload, raw.p_offset);
    Vector<Arch, F> poison = {};
    int64_t j = tile.col_begin;
    for (; j + kLane <= tile.col_end; j += kLane) {
      const Vector<Arch, F> g = load_as<Arch>(gradient + j);
      poison += g - g;
      store<Arch>(payload + j, g);
    }
    if (j < tile.col_end) {
      const Padded<Arch, G> last(gradient + j, tile.col_end - j);
      const Vector<Arch, F> g = load_as<Arch>(last.data);
      poison += g - g;
      F converted[kLane];
      store<Arch>(converted, g);
      std::copy_n(converted, tile.col_end - j, payload + j);
    }
    *slot_pointer<int32_t>(bucket, tile.slot) = is_poisoned<F, Arch::kVectorBytes>(poison);
  }
};

template <class G, class R>
void project_tiles(Isa isa, const Bucket& bucket, const ParallelFor& parallel_for) {
  using F = ComputeOf<G>;
  const Tile* raw_begin = bucket.tiles + bucket.tile_list_begin[kRawTiles];
  for_each_tile(bucket, kMatrixTiles, kRawTiles, parallel_for, [&](const Tile& tile) {
    if (&tile < raw_begin) {
      run_on(isa, ProjectTile<G, R>{bucket, bucket.matrices[tile.item], tile});
    } else {
      run_on(isa, CopyRawTile<G>{bucket, bucket.raw_segments[tile.item], tile});
    }
  });
  bool poisoned = false;
  for (const Tile* tile = bucket.tiles + bucket.tile_list_begin[kMatrixTiles];
       tile < bucket.tiles + bucket.tile_list_begin[kRawTiles + 1]; ++tile) {
    poisoned |= *slot_pointer<int32_t>(bucket, tile->slot) != 0;
  }
  elements<F>(bucket.p_payload, bucket.p_numel - 1)[0] = poisoned ? F{1} : F{0};
}

}  // namespace

void project(Isa isa, const Bucket& bucket, const ParallelFor& parallel_for) {
  with_storage_pair(bucket.gradient_dtype, bucket.residual_dtype, [&](auto gradient, auto residual) {
    project_tiles<decltype(gradient), decltype(residual)>(isa, bucket, parallel_for);
  });
}

void project(const Bucket& bucket, const ParallelFor& parallel_for) {
  project(best_isa(), bucket, parallel_for);
}

}  // namespace powersgd::kernels::cpu
