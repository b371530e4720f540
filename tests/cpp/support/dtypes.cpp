// SPDX-License-Identifier: BSD-3-Clause
#include "support/dtypes.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace powersgd::test {
namespace {

struct Format {
  int mantissa_bits;  // without the hidden one
  int max_exponent;  // of the largest finite value; 1 - max_exponent is that of the smallest normal
};

Format format_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return {10, 15};
    case DType::kBFloat16:
      return {7, 127};
    case DType::kFloat32:
      return {23, 127};
    case DType::kFloat64:
      return {52, 1023};
  }
  return {};
}

uint64_t to_bits(DType dtype, double value) {
  const Format format = format_of(dtype);
  const int exponent_ones = 2 * format.max_exponent + 1;
  const uint64_t sign = std::signbit(value) ? 1 : 0;
  const auto join = [&](uint64_t exponent, uint64_t mantissa) {
    const uint64_t magnitude = exponent << format.mantissa_bits | mantissa;
    return sign << (8 * size_of(dtype) - 1) | magnitude;
  };
  const double rounded = std::fabs(round_to(dtype, value));
  if (std::isnan(rounded)) return join(exponent_ones, uint64_t{1} << (format.mantissa_bits - 1));
  if (std::isinf(rounded)) return join(exponent_ones, 0);
  if (rounded == 0) return join(0, 0);
  const int exponent = std::max(std::ilogb(rounded), 1 - format.max_exponent);
  const auto units = static_cast<uint64_t>(std::ldexp(rounded, format.mantissa_bits - exponent));
  const uint64_t hidden = uint64_t{1} << format.mantissa_bits;
  if (units < hidden) return join(0, units);
  return join(static_cast<uint64_t>(exponent + format.max_exponent), units - hidden);
}

double from_bits(DType dtype, uint64_t bits) {
  const Format format = format_of(dtype);
  const uint64_t mantissa = bits & ((uint64_t{1} << format.mantissa_bits) - 1);
  const int exponent_ones = 2 * format.max_exponent + 1;
  const int exponent = static_cast<int>(bits >> format.mantissa_bits) & exponent_ones;
  const bool negative = (bits >> (8 * size_of(dtype) - 1)) != 0;
  double value;
  if (exponent == exponent_ones) {
    value = mantissa == 0 ? std::numeric_limits<double>::infinity()
                          : std::numeric_limits<double>::quiet_NaN();
  } else {
    const uint64_t hidden = exponent == 0 ? 0 : uint64_t{1} << format.mantissa_bits;
    value = std::ldexp(static_cast<double>(mantissa | hidden),
                       std::max(exponent, 1) - format.max_exponent - format.mantissa_bits);
  }
  return negative ? -value : value;
}

}  // namespace

double round_to(DType dtype, double value) {
  if (dtype == DType::kFloat64 || !std::isfinite(value) || value == 0) return value;
  const Format format = format_of(dtype);
  const int exponent = std::max(std::ilogb(value), 1 - format.max_exponent);
  const double unit = std::ldexp(1.0, exponent - format.mantissa_bits);
  const double rounded = std::nearbyint(value / unit) * unit;
  if (std::fabs(rounded) <= largest(dtype)) return rounded;
  return std::copysign(std::numeric_limits<double>::infinity(), value);
}

double unit_roundoff(DType dtype) { return std::ldexp(0.5, -format_of(dtype).mantissa_bits); }

double largest(DType dtype) {
  const Format format = format_of(dtype);
  return std::ldexp(2 - std::ldexp(1.0, -format.mantissa_bits), format.max_exponent);
}

std::vector<uint8_t> encode(DType dtype, const std::vector<double>& values) {
  const auto size = static_cast<size_t>(size_of(dtype));
  std::vector<uint8_t> bytes(values.size() * size);
  if (dtype == DType::kFloat32) {  // the language's own
    const std::vector<float> floats(values.begin(), values.end());
    if (!floats.empty()) std::memcpy(bytes.data(), floats.data(), bytes.size());
    return bytes;
  }
  for (size_t i = 0; i < values.size(); ++i) {
    const uint64_t bits = to_bits(dtype, values[i]);
    std::memcpy(bytes.data() + i * size, &bits, size);
  }
  return bytes;
}

std::vector<double> decode(DType dtype, const std::vector<uint8_t>& bytes) {
  const auto size = static_cast<size_t>(size_of(dtype));
  std::vector<double> values(bytes.size() / size);
  if (dtype == DType::kFloat32) {
    std::vector<float> floats(values.size());
    if (!floats.empty()) std::memcpy(floats.data(), bytes.data(), bytes.size());
    return std::vector<double>(floats.begin(), floats.end());
  }
  for (size_t i = 0; i < values.size(); ++i) {
    uint64_t bits = 0;
    std::memcpy(&bits, bytes.data() + i * size, size);
    values[i] = from_bits(dtype, bits);
  }
  return values;
}

}  // namespace powersgd::test
