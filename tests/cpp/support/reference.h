// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>

#include "support/test_bucket.h"

// The stages of one matrix by their definition: plain loops, in (long) double. Matrices are
// row-major, q is [rank, cols]. `magnitude` is the same sum with absolute values. The rounding
// errors of any order of summation are a multiple of it.
namespace powersgd::test {

struct Checked {
  Values value;
  Values magnitude;
};

// gradient + scale * (memory - p_hat q_local), the gradient only where it is finite.
Checked reference_m(const Part& part, const Values& gradient, const Values& memory,
                    const Values& p_hat, const Values& q_local, double scale);

Checked reference_p(const Part& part, const Values& m, const Values& q_warm);       // [rows, rank]
Checked reference_q(const Part& part, const Values& m, const Values& p_hat);        // [rank, cols]
Checked reference_product(const Part& part, const Values& p_hat, const Values& q);  // [rows, cols]

// max |p^T p - I|
double orthogonality_error(const Values& p, int64_t rows, int64_t rank);

// The largest column norm of (I - basis basis^T) columns, relative to that of the column itself.
double distance_from_span(const Values& columns, const Values& basis, int64_t rows, int64_t rank);

// |actual - expected| <= tolerance * magnitude + smallest, for every element.
void expect_close(const Values& actual, const Checked& expected, double tolerance,
                  double smallest = 0);

double norm(const Values& values);

// An orthonormal basis of the span of the columns of p, of full rank: modified Gram-Schmidt, twice.
Values orthonormal_basis(const Values& p, int64_t rows, int64_t rank);

}  // namespace powersgd::test
