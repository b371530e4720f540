// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "powersgd/options.h"
#include "support/test_bucket.h"

// The groups of packets by their definition, in double.
namespace powersgd::test {

// Returns the scale of a group of finite values; 0 if the dtype has scales and this is too small,
// and 1 if the dtype has none.
double reference_scale(WireDType dtype, const Values& exact);

bool has_scales(WireDType dtype);

// The largest magnitude of an element in the dtype.
double largest_element(WireDType dtype);

// Expects that `sent` is what a group of `exact` values in the factor dtype travels as.
void expect_quantized(WireDType dtype, const Values& exact, const Values& sent);

}  // namespace powersgd::test
