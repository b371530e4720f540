// SPDX-License-Identifier: BSD-3-Clause
#include "support/packet_reference.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "support/dtypes.h"

namespace powersgd::test {
namespace {

// The largest code of an integer dtype.
double most(WireDType dtype) { return dtype == WireDType::kInt8 ? 127 : 7; }

bool is_integer(WireDType dtype) { return dtype == WireDType::kInt8 || dtype == WireDType::kInt4; }

DType storage_of(WireDType dtype) {
  switch (dtype) {
    case WireDType::kBFloat16:
      return DType::kBFloat16;
    case WireDType::kFloat16:
      return DType::kFloat16;
    default:
      return DType::kFloat32;
  }
}

// The nearest bfloat16 in the given direction.
double to_bfloat16(double value, double (*direction)(double)) {
  if (value == 0) return 0;
  const double unit = std::ldexp(1.0, std::ilogb(value) - 7);
  return direction(value / unit) * unit;
}

double clamped(double value, double limit) {
  return std::isfinite(value) ? std::clamp(value, -limit, limit) : value;
}

double in_float(double value) {
  return round_to(DType::kFloat32, clamped(value, largest(DType::kFloat32)));
}

// The products of codes and scales are exact in double, and float holds them as well.
void expect_element(WireDType dtype, double scale, double exact, double sent) {
  const double value = in_float(exact);
  if (!has_scales(dtype)) {
    const double expected = round_to(storage_of(dtype), clamped(value, largest_element(dtype)));
    if (std::isfinite(exact)) {
      EXPECT_EQ(sent, expected);
    } else {
      EXPECT_FALSE(std::isfinite(sent));
    }
  } else if (scale == 0) {
    EXPECT_EQ(sent, 0);
  } else if (is_integer(dtype)) {
    const double code = sent / scale;
    EXPECT_EQ(code, std::nearbyint(code)) << "no multiple of the scale";
    EXPECT_LE(std::fabs(code), most(dtype));
    // Half a step, and the two roundings of a product with the reciprocal of the scale in float,
    // each up to 127 * 2^-24 steps. The largest floats are up to 2^-6 steps beyond the largest code.
    const double more = std::fabs(value) > largest_element(dtype) ? 0x1p-6 : 0x1p-15;
    EXPECT_LE(std::fabs(code - value / scale), 0.5 + more);
  } else {
    const double limit = largest_element(dtype);
    EXPECT_EQ(sent, round_to(DType::kFloat16, clamped(value, limit) / scale) * scale);
  }
}

}  // namespace

bool has_scales(WireDType dtype) { return is_integer(dtype) || dtype == WireDType::kFloat16; }

double largest_element(WireDType dtype) {
  if (is_integer(dtype)) {
    const double of_float = largest(DType::kFloat32) / most(dtype);
    return to_bfloat16(of_float, &std::floor) * most(dtype);
  }
  if (dtype == WireDType::kFloat16) return std::ldexp(largest(DType::kFloat16), 112);
  return largest(storage_of(dtype));
}

double reference_scale(WireDType dtype, const Values& exact) {
  if (!has_scales(dtype)) return 1;
  double magnitude = 0;
  for (const double value : exact) magnitude = std::max(magnitude, std::fabs(in_float(value)));
  magnitude = std::min(magnitude, largest_element(dtype));
  if (magnitude == 0) return 0;
  const double scale = is_integer(dtype) ? to_bfloat16(magnitude / most(dtype), &std::ceil)
                                         : std::ldexp(1.0, std::ilogb(magnitude) - 14);
  return scale < 0x1p-126 ? 0 : scale;
}

void expect_quantized(WireDType dtype, const Values& exact, const Values& sent) {
  const bool finite =
      std::all_of(exact.begin(), exact.end(), [](double value) { return std::isfinite(value); });
  if (has_scales(dtype) && !finite) {
    for (const double value : sent) EXPECT_TRUE(std::isnan(value));
    return;
  }
  const double scale = finite ? reference_scale(dtype, exact) : 1;
  for (size_t i = 0; i < exact.size(); ++i) {
    SCOPED_TRACE(::testing::Message() << "element " << i << ": " << exact[i] << " as " << sent[i]);
    expect_element(dtype, scale, exact[i], sent[i]);
  }
}

}  // namespace powersgd::test
