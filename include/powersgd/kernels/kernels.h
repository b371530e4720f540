// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "powersgd/core/options.h"

// The four stages of one bucket (docs/algorithm.md), on the CPU and on CUDA, over the same tables.
//
//   project        M = S_new / S_old * (memory - p_hat q_local) + G ; memory = M ; P = M q_warm^T
//   (the caller sums the P payload over the ranks)
//   orthogonalize  p_hat = orth(P), where columns that depend on those before them are 0
//   back_project   q_local = p_hat^T M, also written to the Q payload
//   (the caller sums the Q payload over the ranks)
//   reconstruct    G = output_scale * p_hat Q ; q_warm = the rows of Q at unit norm ;
//                  q_norms = the norms of the rows of Q
//
// S is the loss scale times Bucket::units. memory holds M of the last step. The residual is memory
// minus the product of the factors that this rank sent, which the next step subtracts.
//
// Contract, the same for every implementation:
//   - A stage never allocates, never synchronizes and keeps no state. It gets pointers, sizes, and
//     where to run.
//   - The shapes alone fix every order of summation. orthogonalize and reconstruct give the same
//     bits on any instruction set of one device type, because all ranks must agree on their
//     results.
//   - Products are accumulated in float.
//   - A row of G that is 0 on all ranks, and was so in all steps, becomes exactly 0.
//   - If a row of Q is 0, its row of q_warm moves half way to a random direction (kernels/shared/
//     redraw.h).
//   - project packs the raw segments into the P payload. There it also writes which matrices this
//     rank has used, and whether the gradient has non-finite elements.
//   - project reads the S_old of each matrix from its memory_units. It writes S_new there once all
//     of memory is in the new units, even if the step is skipped later.
//   - An element of M beyond the largest value of memory's dtype is stored as that value.
//   - A non-finite gradient element counts as 0 in M, so memory stays finite, and sets the last
//     element of the P payload to 1.
//   - reconstruct skips the step if that element's sum is not 0, or if a reduced factor is not
//     finite. G becomes NaN, memory becomes M - G again, and q_warm stays. q_local and q_norms
//     become 0, so memory alone is the residual.
//   - A matrix is out of use if no rank has used it: the reduced element at use_offset is 0. DDP
//     drops the output of such a parameter. p_hat and q_warm stay. G, q_local and q_norms become 0,
//     so memory alone is the residual.
// Both payloads are in float32. Where the wire rounds, quantize and dequantize of
// powersgd/packets.h come between the stages, and q_local becomes the value that was sent.
namespace powersgd::kernels {

// One matrix of a bucket. Offsets count elements. Factors are float32.
struct Matrix {
  int64_t rows;
  int64_t cols;
  int64_t rank;
  int64_t gradient_offset;  // [rows, cols] in Bucket::gradient
  int64_t p_offset;         // [rows, rank] in Bucket::p_payload
  int64_t q_offset;         // [rank, cols] in Bucket::q_payload
  void* memory;   // [rows, cols] residual dtype: M. Null: no error feedback, M is G itself
  void* p_hat;    // [rows, rank]: columns that are orthonormal or 0. 0 before the first step
  void* q_local;  // [rank, cols]: this rank's q of the last step; 0: nothing to subtract
  void* q_warm;   // [rank, cols]: the factor that the next project multiplies by (Q transposed)
  uint64_t random_id;       // names the matrix to the random generator, the same on all ranks
  int64_t use_offset = -1;  // in Bucket::p_payload: 1 if this rank has used it; -1: nowhere
  double* memory_units = nullptr;  // the S of memory and q_local. project needs it
  double* q_norms = nullptr;       // [rank]: the norms of the rows of the summed Q; may be null
};

// Elements that travel uncompressed, alongside P.
struct RawSegment {
  int64_t gradient_offset;
  int64_t numel;
  int64_t p_offset;
};

enum class TileKind : int32_t {
  kMatrix,      // rows and columns of a matrix
  kFactorRow,   // columns of row row_begin of a matrix's Q
  kRawSegment,  // elements [col_begin, col_end) of a raw segment
};

// A tile is the unit of work of one block or thread: part of a matrix or of a raw segment. Each
// implementation cuts a bucket in its own way, by the shapes alone.
struct Tile {
  TileKind kind;
  int32_t item;  // index of the matrix or raw segment
  int32_t slot;  // where the partial results of the tiles that are added up begin in the workspace
  int32_t part, parts;  // the number of this tile's partial result, and how many there are
  int32_t counter;      // in Bucket::counters: how many of these have been written
  int64_t row_begin, row_end;
  int64_t col_begin, col_end;
};

constexpr int kTileLists = 7;

// Built once per layout, on the host; the caller copies `tiles` to where the stages run.
struct TileTable {
  std::vector<Tile> tiles;
  std::array<int64_t, kTileLists + 1> list_begin{};  // list i is [list_begin[i], list_begin[i + 1])
  size_t workspace_bytes = 0;                        // 64-byte aligned memory, contents arbitrary
  int64_t num_counters = 0;                          // of Bucket::counters
  int64_t largest_rank = 0;                          // of all matrices
};

// A bucket's memory on its device, kept from stage to stage and from step to step, so a replayed
// CUDA graph continues where the last step ended. Initially zeros.
struct BucketState {
  uint64_t step;    // the number of the step in progress. project writes it
  int32_t skipped;  // 1: this step is skipped. orthogonalize writes it, reconstruct may raise it
};

// Stands for the last step's number plus 1, which the device knows.
constexpr uint64_t kNextStep = UINT64_MAX;

// A step counts once, even if several buckets of an owner report it. Buckets that share a count run
// one after the other.
struct StepCount {
  uint64_t last;  // the last step that counted, plus 1
  uint64_t count;
};

// Everything a stage reads. The tables and all pointers are in memory of the device that runs it.
struct Bucket {
  const Matrix* matrices;
  const RawSegment* raw_segments;
  const Tile* tiles;
  int32_t num_matrices;
  int32_t num_raw_segments;
  std::array<int64_t, kTileLists + 1> tile_list_begin;
  int64_t largest_rank;  // of all matrices, which a launcher on the host cannot read

  void* gradient;  // gradient dtype
  // Both payloads are the tensors that the caller sums.
  void* p_payload;  // float32, p_numel elements; the last is the non-finite count
  void* q_payload;  // float32, q_numel elements
  int64_t p_numel;
  int64_t q_numel;
  void* workspace;
  uint64_t* counters;  // zeros at first; the stages leave them ready for the next use
  BucketState* state;
  StepCount* skipped_steps;  // may be null

  DType gradient_dtype;
  DType residual_dtype;
  // project and back_project may round their operands to bfloat16, because the wire rounds more. M
  // is still exact, so the residual holds what the products lose.
  bool bfloat16_products;

  // The loss scale of this step's gradient, which each CUDA graph replay reads again. Null: 1.
  const float* loss_scale;
  double units;         // a multiplier of the loss scale, the same in every step
  const int32_t* used;  // by matrix: 0 if this rank has not used it; null: it has used all
  double output_scale;  // 1 for SUM, 1 / world size for AVG
  double epsilon;       // a pivot at or below max(2^-46, epsilon) * trace is dead
  uint64_t seed;
  uint64_t step;  // or kNextStep
};

namespace cpu {

// Returns the name of the instruction set that the stages use on this machine: avx512, avx2, neon
// or baseline.
const char* instruction_set();

// Runs body(begin, end) over disjoint ranges that cover [0, count); returns when all have ended.
using ParallelFor =
    std::function<void(int64_t count, const std::function<void(int64_t, int64_t)>& body)>;

TileTable make_tiles(const std::vector<Matrix>& matrices, const std::vector<RawSegment>& raw);

// Fills q_warm with the random start: the numbers depend on (seed, random_id, column, step) alone.
void random_start(const Bucket& bucket, const ParallelFor& parallel_for);
void project(const Bucket& bucket, const ParallelFor& parallel_for);
void orthogonalize(const Bucket& bucket, const ParallelFor& parallel_for);
void back_project(const Bucket& bucket, const ParallelFor& parallel_for);
void reconstruct(const Bucket& bucket, const ParallelFor& parallel_for);

}  // namespace cpu

namespace cuda {

// Stand-ins for cudaStream_t and cudaError_t, so host code needs no CUDA header. 0 is cudaSuccess.
using Stream = void*;
using Status = int;

TileTable make_tiles(const std::vector<Matrix>& matrices, const std::vector<RawSegment>& raw);

// The stages multiply factors of ranks up to this.
constexpr int64_t kMaxRank = 32;

// If this is false, project only forms M, from a memory that is the residual already, and
// reconstruct leaves zeros in place of the product. The caller does the products and the other two
// stages.
inline bool multiplies(int64_t largest_rank) { return largest_rank <= kMaxRank; }

// The number of kernels that this process has launched.
int64_t launch_count();

Status random_start(const Bucket& bucket, Stream stream);
Status project(const Bucket& bucket, Stream stream);
Status orthogonalize(const Bucket& bucket, Stream stream);
Status back_project(const Bucket& bucket, Stream stream);
Status reconstruct(const Bucket& bucket, Stream stream);

// True if the stream is being captured into a CUDA graph.
bool is_capturing(Stream stream);

// Returns the name of a failed launch's error, and clears CUDA's last error, which the next caller
// would otherwise take for its own.
const char* error_name(Status status);

}  // namespace cuda

}  // namespace powersgd::kernels
