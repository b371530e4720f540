// SPDX-License-Identifier: BSD-3-Clause
#include "support/reference.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

namespace powersgd::test {
namespace {

using Real = long double;

size_t at(int64_t row, int64_t col, int64_t cols) { return static_cast<size_t>(row * cols + col); }

// sum over s of left(s) * right(s), and of its absolute value.
template <class Left, class Right>
void sum_products(int64_t count, const Left& left, const Right& right, Checked& into) {
  Real sum = 0;
  Real magnitude = 0;
  for (int64_t s = 0; s < count; ++s) {
    const Real product = static_cast<Real>(left(s)) * static_cast<Real>(right(s));
    sum += product;
    magnitude += std::fabs(product);
  }
  into.value.push_back(static_cast<double>(sum));
  into.magnitude.push_back(static_cast<double>(magnitude));
}

}  // namespace

Checked reference_product(const Part& part, const Values& p_hat, const Values& q) {
  Checked product;
  for (int64_t i = 0; i < part.rows; ++i) {
    for (int64_t j = 0; j < part.cols; ++j) {
      sum_products(
          part.rank, [&](int64_t k) { return p_hat[at(i, k, part.rank)]; },
          [&](int64_t k) { return q[at(k, j, part.cols)]; }, product);
    }
  }
  return product;
}

Checked reference_m(const Part& part, const Values& gradient, const Values& memory,
                    const Values& p_hat, const Values& q_local, double scale) {
  Checked m = reference_product(part, p_hat, q_local);
  for (size_t i = 0; i < gradient.size(); ++i) {
    const double g = std::isfinite(gradient[i]) ? gradient[i] : 0;
    m.value[i] = g + scale * (memory[i] - m.value[i]);
    m.magnitude[i] = std::fabs(g) + std::fabs(scale) * (std::fabs(memory[i]) + m.magnitude[i]);
  }
  return m;
}

Checked reference_p(const Part& part, const Values& m, const Values& q_warm) {
  Checked p;
  for (int64_t i = 0; i < part.rows; ++i) {
    for (int64_t k = 0; k < part.rank; ++k) {
      sum_products(
          part.cols, [&](int64_t j) { return m[at(i, j, part.cols)]; },
          [&](int64_t j) { return q_warm[at(k, j, part.cols)]; }, p);
    }
  }
  return p;
}

Checked reference_q(const Part& part, const Values& m, const Values& p_hat) {
  Checked q;
  for (int64_t k = 0; k < part.rank; ++k) {
    for (int64_t j = 0; j < part.cols; ++j) {
      sum_products(
          part.rows, [&](int64_t i) { return p_hat[at(i, k, part.rank)]; },
          [&](int64_t i) { return m[at(i, j, part.cols)]; }, q);
    }
  }
  return q;
}

double orthogonality_error(const Values& p, int64_t rows, int64_t rank) {
  Real largest = 0;
  for (int64_t a = 0; a < rank; ++a) {
    for (int64_t b = 0; b < rank; ++b) {
      Real sum = a == b ? -1 : 0;
      for (int64_t i = 0; i < rows; ++i) {
        sum += static_cast<Real>(p[at(i, a, rank)]) * static_cast<Real>(p[at(i, b, rank)]);
      }
      largest = std::max(largest, std::fabs(sum));
    }
  }
  return static_cast<double>(largest);
}

double distance_from_span(const Values& columns, const Values& basis, int64_t rows, int64_t rank) {
  double largest = 0;
  for (int64_t column = 0; column < rank; ++column) {
    std::vector<Real> rest;
    Real before = 0;
    for (int64_t i = 0; i < rows; ++i) {
      rest.push_back(columns[at(i, column, rank)]);
      before += rest.back() * rest.back();
    }
    if (before == 0) continue;
    for (int64_t k = 0; k < rank; ++k) {
      Real dot = 0;
      for (int64_t i = 0; i < rows; ++i) {
        dot += static_cast<Real>(columns[at(i, column, rank)]) * basis[at(i, k, rank)];
      }
      for (int64_t i = 0; i < rows; ++i) {
        rest[static_cast<size_t>(i)] -= dot * basis[at(i, k, rank)];
      }
    }
    Real after = 0;
    for (const Real value : rest) after += value * value;
    largest = std::max(largest, static_cast<double>(std::sqrt(after / before)));
  }
  return largest;
}

void expect_close(const Values& actual, const Checked& expected, double tolerance,
                  double smallest) {
  ASSERT_EQ(actual.size(), expected.value.size());
  size_t worst = 0;
  double worst_excess = 0;
  size_t failures = 0;
  for (size_t i = 0; i < actual.size(); ++i) {
    const double allowed = tolerance * expected.magnitude[i] + smallest;
    const double error = std::fabs(actual[i] - expected.value[i]);
    if (error <= allowed) continue;
    ++failures;
    const double excess = error / std::max(allowed, 1e-300);
    if (!(excess <= worst_excess)) {
      worst_excess = excess;
      worst = i;
    }
  }
  EXPECT_EQ(failures, 0u) << "of " << actual.size() << " elements; the worst, " << worst << ": "
                          << actual[worst] << " for " << expected.value[worst] << ", "
                          << worst_excess << " times what is allowed";
}

double norm(const Values& values) {
  Real sum = 0;
  for (const double value : values) sum += static_cast<Real>(value) * value;
  return static_cast<double>(std::sqrt(sum));
}

Values orthonormal_basis(const Values& p, int64_t rows, int64_t rank) {
  std::vector<Real> basis(p.begin(), p.end());
  const auto dot = [&](int64_t a, int64_t b) {
    Real sum = 0;
    for (int64_t i = 0; i < rows; ++i) sum += basis[at(i, a, rank)] * basis[at(i, b, rank)];
    return sum;
  };
  for (int64_t a = 0; a < rank; ++a) {
    for (int pass = 0; pass < 2; ++pass) {
      for (int64_t b = 0; b < a; ++b) {
        const Real share = dot(a, b);
        for (int64_t i = 0; i < rows; ++i) basis[at(i, a, rank)] -= share * basis[at(i, b, rank)];
      }
    }
    const Real length = std::sqrt(dot(a, a));
    for (int64_t i = 0; i < rows && length > 0; ++i) basis[at(i, a, rank)] /= length;
  }
  return Values(basis.begin(), basis.end());
}

}  // namespace powersgd::test
