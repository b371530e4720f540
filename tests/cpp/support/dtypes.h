// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <vector>

#include "powersgd/options.h"

// The storage types as tests see them: every value is a double. Written from the definition of the
// formats, sharing nothing with the conversions of the kernels.
namespace powersgd::test {

// The nearest value of the format, ties to even; infinity beyond the largest.
double round_to(DType dtype, double value);

// Half the distance from 1 to the next larger value of the format.
double unit_roundoff(DType dtype);
double largest(DType dtype);

std::vector<uint8_t> encode(DType dtype, const std::vector<double>& values);
std::vector<double> decode(DType dtype, const std::vector<uint8_t>& bytes);

}  // namespace powersgd::test
