// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/cpu/simd/convert.h"

// Norm and scaling of the rows of Q, in double. Sums are taken over kNormLanes lanes, whatever the
// vectors are, so that all instruction sets give the same bits.
namespace powersgd::kernels::cpu {

constexpr int64_t kNormLanes = 16;

// The squared norm of a row of Q.
template <class F>
struct SquareRow {
  const F* row;
  int64_t cols;
  double* result;

  template <class Arch>
  POWERSGD_INLINE void run() const {
    constexpr int64_t kLane = kLanes<Arch, double>;
    Vector<Arch, double> sums[kNormLanes / kLane] = {};
    int64_t j = 0;
    for (; j + kNormLanes <= cols; j += kNormLanes) add<Arch>(row + j, sums);
    if (j < cols) {
      F last[kNormLanes] = {};
      std::copy_n(row + j, cols - j, last);
      add<Arch>(last, sums);
    }
    double lanes[kNormLanes];
    for (int64_t i = 0; i < kNormLanes / kLane; ++i) store<Arch>(lanes + i * kLane, sums[i]);
    *result = 0;
    for (const double lane : lanes) *result += lane;
  }

  template <class Arch>
  POWERSGD_INLINE void add(const F* values, Vector<Arch, double>* sums) const {
    constexpr int64_t kLane = kLanes<Arch, double>;
    POWERSGD_UNROLL
    for (int64_t i = 0; i < kNormLanes / kLane; ++i) {
      const Vector<Arch, double> value = load_double<Arch>(values + i * kLane);
      sums[i] += value * value;
    }
  }
};

template <class F>
struct ScaleRow {
  const F* row;
  int64_t cols;
  double scale;
  F* q_warm;

  template <class Arch>
  POWERSGD_INLINE void run() const {
    constexpr int64_t kLane = kLanes<Arch, double>;
    int64_t j = 0;
    for (; j + kLane <= cols; j += kLane) {
      store_double<Arch>(q_warm + j, Vector<Arch, double>(load_double<Arch>(row + j) * scale));
    }
    for (; j < cols; ++j) q_warm[j] = static_cast<F>(row[j] * scale);
  }
};

}  // namespace powersgd::kernels::cpu
