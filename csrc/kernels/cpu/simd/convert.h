// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "kernels/cpu/simd/vector.h"

// Storage types and their conversion to the type that kernels compute in. Rounding is to nearest
// even, so that every instruction set gives the same bits, NaN aside.
namespace powersgd::kernels::cpu {

struct BFloat16 {
  uint16_t bits;
};

struct Half {
  uint16_t bits;
};

template <class Storage>
struct StorageTraits {
  using Compute = float;
};
template <>
struct StorageTraits<double> {
  using Compute = double;
};
template <class Storage>
using ComputeOf = typename StorageTraits<Storage>::Compute;

// The largest finite value, which what is stored is clamped to.
template <class Storage>
constexpr ComputeOf<Storage> kLargest = 0;
template <>
constexpr float kLargest<float> = 3.40282347e+38f;
template <>
constexpr double kLargest<double> = 1.7976931348623157e+308;
template <>
constexpr float kLargest<BFloat16> = 3.38953139e+38f;
template <>
constexpr float kLargest<Half> = 65504.0f;

// 32-bit words, and the 16-bit elements that they hold in their lower halves.
template <class Arch>
using Words = Vector<Arch, uint32_t>;
template <class Arch>
using HalfWords = typename VectorOf<uint16_t, Arch::kVectorBytes / 2>::Type;
template <class Arch>
using Floats = Vector<Arch, float>;

template <class Arch>
POWERSGD_INLINE HalfWords<Arch> load_half_words(const void* source) {
  using Unaligned = typename VectorOf<uint16_t, Arch::kVectorBytes / 2>::Unaligned;
  return *static_cast<const Unaligned*>(source);
}

template <class Arch>
POWERSGD_INLINE void store_half_words(void* target, const HalfWords<Arch>& value) {
  *static_cast<typename VectorOf<uint16_t, Arch::kVectorBytes / 2>::Unaligned*>(target) = value;
}

// GCC 12 widens and narrows in two parts, hence the instructions by name.
template <class Arch>
POWERSGD_INLINE Words<Arch> widened(const HalfWords<Arch>& half_words) {
  if constexpr (Arch::kHasAvx) {
    Words<Arch> words;
    asm("vpmovzxwd %1, %0" : "=v"(words) : "vm"(half_words));
    return words;
  } else {
    return __builtin_convertvector(half_words, Words<Arch>);
  }
}

template <class Arch>
POWERSGD_INLINE HalfWords<Arch> narrowed(const Words<Arch>& words) {
  if constexpr (Arch::kVectorBytes == 64) {
    HalfWords<Arch> half_words;
    asm("vpmovdw %1, %0" : "=v"(half_words) : "v"(words));
    return half_words;
  } else {
    return __builtin_convertvector(words, HalfWords<Arch>);
  }
}

// The words of floats whose upper halves are those floats rounded to bfloat16. A NaN stays one if
// it comes from arithmetic, as all NaN here do: the lower half of such a NaN is 0.
template <class Arch>
POWERSGD_INLINE Words<Arch> rounded_to_bfloat16(const Floats<Arch>& value) {
  const auto bits = bits_as<Words<Arch>>(value);
  return bits + 0x7FFFu + ((bits >> 16) & 1u);
}

// Fabian Giesen, "Half to float done quick" and "Float->half variants" (2012).
template <class Arch>
POWERSGD_INLINE Floats<Arch> from_half(const HalfWords<Arch>& half_words) {
  if constexpr (Arch::kHasAvx) {
    Floats<Arch> value;
    asm("vcvtph2ps %1, %0" : "=v"(value) : "vm"(half_words));
    return value;
  } else {
    constexpr uint32_t kRebias = 112u << 23;
    const Words<Arch> words = widened<Arch>(half_words);
    const Words<Arch> magnitude = (words & 0x7FFFu) << 13;
    const Words<Arch> exponent = words & 0x7C00u;
    const Words<Arch> normal = magnitude + kRebias;
    // A subnormal is the mantissa added to a power of two, less that power of two.
    const Words<Arch> offset = broadcast<Arch>(113u << 23);
    const auto subnormal = bits_as<Words<Arch>>(bits_as<Floats<Arch>>(magnitude + offset) -
                                                bits_as<Floats<Arch>>(offset));
    const Words<Arch> finite = exponent == 0u ? subnormal : normal;
    const Words<Arch> result = exponent == 0x7C00u ? normal + kRebias : finite;
    return bits_as<Floats<Arch>>(result | (words & 0x8000u) << 16);
  }
}

template <class Arch>
POWERSGD_INLINE HalfWords<Arch> to_half(const Floats<Arch>& value) {
  if constexpr (Arch::kHasAvx) {
    HalfWords<Arch> half_words;
    asm("vcvtps2ph $0, %1, %0" : "=v"(half_words) : "v"(value));
    return half_words;
  } else {
    const auto bits = bits_as<Words<Arch>>(value);
    const Words<Arch> magnitude = bits & 0x7FFFFFFFu;
    const Words<Arch> special = magnitude > 0x7F800000u ? broadcast<Arch>(0x7E00u)  // NaN
                                                        : broadcast<Arch>(0x7C00u);
    // Adding 0.5 aligns the mantissa of what becomes subnormal, and the adder rounds it.
    const Words<Arch> half = broadcast<Arch>(126u << 23);
    const Words<Arch> subnormal =
        bits_as<Words<Arch>>(bits_as<Floats<Arch>>(magnitude) + bits_as<Floats<Arch>>(half)) - half;
    const Words<Arch> normal =
        (magnitude + (0xFFFu - (112u << 23)) + ((magnitude >> 13) & 1u)) >> 13;
    const Words<Arch> finite = magnitude < (113u << 23) ? subnormal : normal;
    const Words<Arch> result = magnitude >= (143u << 23) ? special : finite;
    return narrowed<Arch>(result | ((bits >> 16) & 0x8000u));
  }
}

// One vector of the compute type from as many stored elements.
template <class Arch, class Storage>
POWERSGD_INLINE Vector<Arch, ComputeOf<Storage>> load_as(const Storage* source) {
  if constexpr (std::is_same_v<Storage, BFloat16>) {
    const Words<Arch> words = widened<Arch>(load_half_words<Arch>(source));
    return bits_as<Floats<Arch>>(words << 16);
  } else if constexpr (std::is_same_v<Storage, Half>) {
    return from_half<Arch>(load_half_words<Arch>(source));
  } else {
    return load<Arch, Storage>(source);
  }
}

// Stores a vector of the compute type, and returns it as it was stored.
template <class Arch, class Storage>
POWERSGD_INLINE Vector<Arch, ComputeOf<Storage>> store_rounded(
    Storage* target, const Vector<Arch, ComputeOf<Storage>>& value) {
  if constexpr (std::is_same_v<Storage, BFloat16>) {
    const Words<Arch> rounded = rounded_to_bfloat16<Arch>(value);
    store_half_words<Arch>(target, narrowed<Arch>(rounded >> 16));
    return bits_as<Floats<Arch>>(rounded & 0xFFFF0000u);
  } else if constexpr (std::is_same_v<Storage, Half>) {
    const HalfWords<Arch> half_words = to_half<Arch>(value);
    store_half_words<Arch>(target, half_words);
    return from_half<Arch>(half_words);
  } else {
    store<Arch, Storage>(target, value);
    return value;
  }
}

// The upper halves of the words of a, then of those of b.
template <class Arch, size_t... kLane>
POWERSGD_INLINE Vector<Arch, uint16_t> upper_halves(const Words<Arch>& a, const Words<Arch>& b,
                                                    std::index_sequence<kLane...>) {
  using V = Vector<Arch, uint16_t>;
  return POWERSGD_SHUFFLE(V, bits_as<V>(a), bits_as<V>(b), (2 * kLane + 1)...);
}

// store_rounded of several vectors, past the caches if kNonTemporal, to an address that is then
// aligned to a vector. Two vectors of bfloat16 are narrowed for half the price of one and one.
template <class Arch, bool kNonTemporal, class Storage, int kCount>
POWERSGD_INLINE void store_all_as(Storage* target,
                                  const Vector<Arch, ComputeOf<Storage>> (&values)[kCount]) {
  constexpr int64_t kLane = kLanes<Arch, ComputeOf<Storage>>;
  const auto put = [](void* to, const auto& converted) POWERSGD_INLINE_LAMBDA {
    if constexpr (kNonTemporal) {
      stream<Arch>(to, converted);
    } else {
      std::memcpy(to, &converted, sizeof(converted));
    }
  };
  if constexpr (std::is_same_v<Storage, BFloat16> && kCount % 2 == 0) {
    POWERSGD_UNROLL
    for (int i = 0; i < kCount; i += 2) {
      put(target + i * kLane,
          upper_halves<Arch>(rounded_to_bfloat16<Arch>(values[i]),
                             rounded_to_bfloat16<Arch>(values[i + 1]),
                             std::make_index_sequence<2 * static_cast<size_t>(kLane)>()));
    }
  } else {
    POWERSGD_UNROLL
    for (int i = 0; i < kCount; ++i) {
      if constexpr (std::is_same_v<Storage, ComputeOf<Storage>>) {
        put(target + i * kLane, values[i]);
      } else {
        HalfWords<Arch> converted;
        store_rounded<Arch>(reinterpret_cast<Storage*>(&converted), values[i]);
        put(target + i * kLane, converted);
      }
    }
  }
}

// body(j, count) for each vector of [0, size): count elements from j on. Except for the last, which
// may be incomplete, count is a constant once all is inlined, and what would be slow is not there.
template <class Arch, class F, class Body>
POWERSGD_INLINE void for_each_vector(int64_t size, const Body& body) {
  constexpr int64_t kLane = kLanes<Arch, F>;
  int64_t j = 0;
  for (; j + kLane <= size; j += kLane) body(j, kLane);
  if (j < size) body(j, size - j);
}

// load_as of the first `count` elements, followed by zeros.
template <class Arch, class Storage>
POWERSGD_INLINE Vector<Arch, ComputeOf<Storage>> load_first(const Storage* source, int64_t count) {
  constexpr int64_t kLane = kLanes<Arch, ComputeOf<Storage>>;
  if (count == kLane) return load_as<Arch>(source);
  Storage padded[kLane] = {};
  std::copy_n(source, count, padded);
  return load_as<Arch>(padded);
}

// store_rounded of the first `count` elements.
template <class Arch, class Storage>
POWERSGD_INLINE Vector<Arch, ComputeOf<Storage>> store_first(
    Storage* target, int64_t count, const Vector<Arch, ComputeOf<Storage>>& value) {
  constexpr int64_t kLane = kLanes<Arch, ComputeOf<Storage>>;
  if (count == kLane) return store_rounded<Arch>(target, value);
  Storage converted[kLane];
  const auto stored = store_rounded<Arch>(converted, value);
  std::copy_n(converted, count, target);
  return stored;
}

// One vector of doubles from as many elements of a factor, and back.
template <class Arch, class F>
POWERSGD_INLINE Vector<Arch, double> load_double(const F* source) {
  using Narrow = typename VectorOf<F, Arch::kVectorBytes / sizeof(double) * sizeof(F)>::Unaligned;
  return __builtin_convertvector(*reinterpret_cast<const Narrow*>(source), Vector<Arch, double>);
}

template <class Arch, class F>
POWERSGD_INLINE void store_double(F* target, const Vector<Arch, double>& value) {
  using Narrow = typename VectorOf<F, Arch::kVectorBytes / sizeof(double) * sizeof(F)>::Unaligned;
  *reinterpret_cast<Narrow*>(target) = __builtin_convertvector(value, Narrow);
}

// Values, 0 in place of those that are not finite.
template <class V>
POWERSGD_INLINE V finite_or_zero(const V& value) {
  const V zero = {};
  return value - value == zero ? value : zero;
}

// Values of at most kLargest<Storage> in magnitude. Not for NaN.
template <class Arch, class Storage>
POWERSGD_INLINE Vector<Arch, ComputeOf<Storage>> clamped_to(
    const Vector<Arch, ComputeOf<Storage>>& value) {
  return within<Arch>(value, broadcast<Arch>(kLargest<Storage>));
}

// Calls function(Storage{}) with the storage type of a dtype.
template <class Function>
void with_storage(DType dtype, const Function& function) {
  switch (dtype) {
    case DType::kFloat32:
      return function(float{});
    case DType::kFloat64:
      return function(double{});
    case DType::kBFloat16:
      return function(BFloat16{});
    case DType::kFloat16:
      return function(Half{});
  }
}

// Calls function(G{}, R{}) with the storage types of gradient and residual: float64 goes with
// itself.
template <class Function>
void with_storage_pair(DType gradient, DType residual, const Function& function) {
  with_storage(gradient, [&](auto g) {
    if constexpr (std::is_same_v<decltype(g), double>) {
      function(g, g);
    } else {
      with_storage(residual, [&](auto r) {
        if constexpr (!std::is_same_v<decltype(r), double>) function(g, r);
      });
    }
  });
}

}  // namespace powersgd::kernels::cpu
