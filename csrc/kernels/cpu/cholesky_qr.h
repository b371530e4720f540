// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "kernels/cpu/blocking/tiles.h"
#include "kernels/cpu/simd/vector.h"
#include "kernels/shared/numerics.h"

// The part of a pass of Cholesky-QR that runs once per matrix. It takes the rank x rank Gram matrix
// of the columns and makes the transform T that orthonormalizes them, P T = P_hat.
//
// Y. Yamamoto, Y. Nakatsukasa, Y. Yanagisawa, T. Fukaya, "Roundoff error analysis of the
// CholeskyQR2 algorithm" (ETNA 44, 2015): one pass leaves an error of the unit roundoff times the
// squared condition number, a second one removes it. The Gram matrix is in double, P in float, so
// one pass is usually enough.
namespace powersgd::kernels::cpu::POWERSGD_TARGET {

struct FactorState {
  int32_t finite;     // whether P is
  int32_t last_pass;  // the pass that leaves its columns orthonormal
};

// The workspace of one matrix. All rank x rank matrices have rows of `stride` elements.
struct FactorSpace {
  FactorSpace(const Bucket& bucket, const Matrix& matrix, int32_t slot) : layout(matrix) {
    base = slot_pointer<double>(bucket, slot);
    transform = base;
    gram = base + layout.gram();
    diagonal = base + layout.diagonal();
    state = reinterpret_cast<FactorState*>(base + layout.state());
  }
  double* partial(int64_t part) const { return base + layout.partial(part); }

  OrthogonalizeLayout layout;
  double* base;
  double* transform;
  double* gram;
  double* diagonal;
  FactorState* state;
};

// row -= factor * other, for columns [begin, end): from the vector that holds `begin`, since what
// lies below the diagonal is never read.
inline void subtract_row(double* row, const double* other, double factor, int64_t begin,
                         int64_t end) {
  constexpr int64_t kLane = kLanes<double>;
  for (int64_t j = begin / kLane * kLane; j < end; j += kLane) {
    const Doubles rest = load(row + j) - factor * load(other + j);
    store(row + j, rest);
  }
}

inline void scale_row(double* row, double factor, int64_t begin, int64_t end) {
  constexpr int64_t kLane = kLanes<double>;
  for (int64_t j = begin / kLane * kLane; j < end; j += kLane) {
    store(row + j, load(row + j) * factor);
  }
}

struct FactorMatrix {
  FactorSpace space;
  int64_t rank;
  double epsilon;
  double weak_pivot;
  int pass;

  POWERSGD_TILE_FUNCTION void run() const {
    sum_partials();
    if (space.state->finite == 0) return;
    const bool again = decompose();
    space.state->last_pass = again && pass + 1 < kMaxPasses ? pass + 1 : pass;
    invert();
  }

  // gram = the sum of the partial Gram matrices.
  void sum_partials() const {
    constexpr int64_t kLane = kLanes<double>;
    const OrthogonalizeLayout& layout = space.layout;
    for (int64_t j = 0; j < layout.square; j += kLane) {
      Doubles sum = {};
      for (int64_t part = 0; part < layout.parts; ++part) {
        sum += load(space.partial(part) + j);
      }
      store(space.gram + j, sum);
    }
    for (int64_t k = 0; k < rank; ++k) space.diagonal[k] = space.gram[k * layout.stride + k];
    if (pass > 0) return;
    // A non-finite column has a non-finite squared norm.
    space.state->finite = std::all_of(space.diagonal, space.diagonal + rank,
                                      [](double square) { return std::isfinite(square); });
  }

  // gram = its upper Cholesky factor, with the rows and columns of dead columns 0. Returns whether
  // the result must be orthogonalized once more.
  bool decompose() const {
    const int64_t stride = space.layout.stride;
    double trace = 0;
    for (int64_t i = 0; i < rank; ++i) trace += space.diagonal[i];
    const double share = pass == 0 ? dead_share(epsilon) : kDeadPivot;
    bool again = false;
    for (int64_t i = 0; i < rank; ++i) {
      double* row = space.gram + i * stride;
      const double pivot = row[i];
      const bool dead = !(pivot > share * (pass == 0 ? trace : space.diagonal[i]));
      if (dead) {
        for (int64_t k = 0; k <= i; ++k) space.gram[k * stride + i] = 0;
        for (int64_t j = i; j < stride; ++j) row[j] = 0;
        continue;
      }
      again |= pivot < weak_pivot * space.diagonal[i];
      scale_row(row, 1 / std::sqrt(pivot), i, stride);
      for (int64_t k = i + 1; k < rank; ++k) {
        subtract_row(space.gram + k * stride, row, row[k], k, stride);
      }
    }
    return again;
  }

  // transform = the inverse of the Cholesky factor, row by row from the last:
  // T_i = (e_i - sum over k > i of R_ik T_k) / R_ii. Dead columns get zeros.
  void invert() const {
    const int64_t stride = space.layout.stride;
    for (int64_t i = rank - 1; i >= 0; --i) {
      const double* row = space.gram + i * stride;
      double* target = space.transform + i * stride;
      for (int64_t j = 0; j < stride; ++j) target[j] = 0;
      if (row[i] == 0) continue;  // dead
      target[i] = 1;
      for (int64_t k = i + 1; k < rank; ++k) {
        subtract_row(target, space.transform + k * stride, row[k], 0, stride);
      }
      scale_row(target, 1 / row[i], 0, stride);
    }
  }
};

}  // namespace powersgd::kernels::cpu::POWERSGD_TARGET
