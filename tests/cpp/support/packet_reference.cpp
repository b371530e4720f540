// SPDX-License-Identifier: BSD-3-Clause
#include "support/packet_reference.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "support/dtypes.h"

namespace powersgd::test {
namespace {

bool is_integer(WireDType dtype) { return dtype == WireDType::kInt8 || dtype == WireDType::kInt4; }

// The largest code of an integer dtype.
double most(WireDType dtype) { return dtype == WireDType::kInt8 ? 127 : 7; }

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

// Returns whether an element of a group with this scale may travel as `sent`. The products of codes
// and scales are exact in double, and float holds them as well.
bool is_quantized(WireDType dtype, double scale, double exact, double sent) {
  const double value = in_float(exact);
  const double in_range = clamped(value, largest_element(dtype));
  if (!has_scales(dtype)) {
    return std::isfinite(exact) ? sent == round_to(storage_of(dtype), in_range)
                                : !std::isfinite(sent);
  }
  if (scale == 0) return sent == 0;
  if (!is_integer(dtype)) return sent == round_to(DType::kFloat16, in_range / scale) * scale;
  const double code = sent / scale;
  // Half a step, and the two roundings of a product with the reciprocal of the scale in float, each
  // up to 127 * 2^-24 steps.
  return code == std::nearbyint(code) && std::fabs(code) <= most(dtype) &&
         std::fabs(code - in_range / scale) <= 0.5 + 0x1p-15;
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
    EXPECT_TRUE(is_quantized(dtype, scale, exact[i], sent[i]))
        << "element " << i << ": " << exact[i] << " as " << sent[i] << ", scale " << scale;
  }
}

}  // namespace powersgd::test
