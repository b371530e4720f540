// SPDX-License-Identifier: BSD-3-Clause
//
// random_start: q_warm = random numbers, the same on all ranks. Their scale does not matter: only
// the span of M q_warm^T does.
#include "kernels/cpu/blocking/tiles.h"
#include "kernels/shared/philox.h"
#include "kernels/shared/steps.h"

namespace powersgd::kernels::cpu {
namespace {

void fill_row(const Bucket& bucket, const Tile& tile) {
  const Matrix& matrix = bucket.matrices[tile.item];
  float* row = static_cast<float*>(matrix.q_warm) + tile.row_begin * matrix.cols;
  for (int64_t j = 0; j < matrix.cols; ++j) {
    row[j] = random_element(bucket.seed, matrix.random_id, begun_step(bucket), RandomUse::kStart,
                            static_cast<uint32_t>(tile.row_begin), static_cast<uint64_t>(j));
  }
}

}  // namespace

void random_start(const Bucket& bucket, const ParallelFor& parallel_for) {
  for_each_tile(bucket, kFactorRowTiles, parallel_for,
                [&](const Tile& tile) { fill_row(bucket, tile); });
}

}  // namespace powersgd::kernels::cpu
