// SPDX-License-Identifier: BSD-3-Clause
#pragma once

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
    order = reinterpret_cast<int32_t*>(base + layout.order());
    dead = order + layout.stride;
    state = reinterpret_cast<FactorState*>(base + layout.state());
  }
  double* partial(int64_t part) const { return base + layout.partial(part); }

  OrthogonalizeLayout layout;
  double* base;
  double* transform;
  double* gram;
  double* diagonal;
  int32_t* order;  // the columns in the order in which they are factored
  int32_t* dead;   // by column: whether it was found dead in this pass
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
    gather_gram();
    const bool again = decompose();
    space.state->last_pass = again && pass + 1 < kMaxPasses ? pass + 1 : pass;
    invert();
    order_dead_last();
  }

  // transform = the sum of the partial Gram matrices, for now.
  void sum_partials() const {
    constexpr int64_t kLane = kLanes<double>;
    const OrthogonalizeLayout& layout = space.layout;
    for (int64_t j = 0; j < layout.square; j += kLane) {
      Doubles sum = {};
      for (int64_t part = 0; part < layout.parts; ++part) {
        sum += load(space.partial(part) + j);
      }
      store(space.transform + j, sum);
    }
    if (pass > 0) return;
    // A non-finite column has a non-finite squared norm.
    space.state->finite = 1;
    for (int64_t k = 0; k < rank; ++k) {
      space.order[k] = static_cast<int32_t>(k);
      if (!std::isfinite(space.transform[k * layout.stride + k])) space.state->finite = 0;
    }
  }

  // gram = the Gram matrix in the order of factoring.
  void gather_gram() const {
    const int64_t stride = space.layout.stride;
    for (int64_t i = 0; i < rank; ++i) {
      const double* row = space.transform + space.order[i] * stride;
      for (int64_t j = 0; j < rank; ++j) space.gram[i * stride + j] = row[space.order[j]];
      for (int64_t j = rank; j < stride; ++j) space.gram[i * stride + j] = 0;
      space.diagonal[i] = space.gram[i * stride + i];
    }
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
      space.dead[space.order[i]] = dead;
      again |= dead || pivot < weak_pivot * space.diagonal[i];
      if (dead) {
        for (int64_t k = 0; k <= i; ++k) space.gram[k * stride + i] = 0;
        for (int64_t j = i; j < stride; ++j) row[j] = 0;
        continue;
      }
      scale_row(row, 1 / std::sqrt(pivot), i, stride);
      for (int64_t k = i + 1; k < rank; ++k) {
        subtract_row(space.gram + k * stride, row, row[k], k, stride);
      }
    }
    return again;
  }

  // transform = the inverse of the Cholesky factor, rows and columns back in their own places: row
  // by row from the last, T_i = (e_i - sum over k > i of R_ik T_k) / R_ii. Dead columns get zeros.
  void invert() const {
    const int64_t stride = space.layout.stride;
    for (int64_t i = rank - 1; i >= 0; --i) {
      const double* row = space.gram + i * stride;
      double* target = space.transform + space.order[i] * stride;
      for (int64_t j = 0; j < stride; ++j) target[j] = 0;
      if (space.dead[space.order[i]] != 0) continue;
      target[space.order[i]] = 1;
      for (int64_t k = i + 1; k < rank; ++k) {
        subtract_row(target, space.transform + space.order[k] * stride, row[k], 0, stride);
      }
      scale_row(target, 1 / row[i], 0, stride);
    }
  }

  // Live columns first: in the next pass only the replacements of dead ones are bent. A stable
  // partition of `order` with `diagonal` as the scratch space.
  void order_dead_last() const {
    auto* dead_columns = reinterpret_cast<int32_t*>(space.diagonal);
    int64_t live_count = 0;
    int64_t dead_count = 0;
    for (int64_t i = 0; i < rank; ++i) {
      const int32_t column = space.order[i];
      if (space.dead[column] != 0) {
        dead_columns[dead_count++] = column;
      } else {
        space.order[live_count++] = column;
      }
    }
    for (int64_t i = 0; i < dead_count; ++i) space.order[live_count + i] = dead_columns[i];
  }
};

}  // namespace powersgd::kernels::cpu::POWERSGD_TARGET
