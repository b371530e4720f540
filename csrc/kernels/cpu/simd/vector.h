// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstddef>
#include <cstdint>

// Vectors of the target's width, by GCC's vector extensions: + - * / & | >> and comparisons are
// operators. instructions.h adds what has no operator.
//
// A file of csrc/kernels/cpu/targets defines two macros before it includes this header, and with it
// everything that is compiled once per target:
//   POWERSGD_TARGET         the namespace of the target's functions,
//   POWERSGD_VECTOR_BYTES   the size of its vectors.
#if !defined(POWERSGD_TARGET) || !defined(POWERSGD_VECTOR_BYTES)
#error "This header is compiled once per target: include it from a file of kernels/cpu/targets."
#endif

namespace powersgd::kernels::cpu::POWERSGD_TARGET {

constexpr size_t kVectorBytes = POWERSGD_VECTOR_BYTES;
#if POWERSGD_VECTOR_BYTES == 64 || defined(__aarch64__)
constexpr int kRegisters = 32;
#else
constexpr int kRegisters = 16;
#endif

// In front of a function that works on a tile: all that it calls is inlined into it, so that
// vectors stay in registers. Builds with sanitizers define it as nothing.
#ifndef POWERSGD_TILE_FUNCTION
#define POWERSGD_TILE_FUNCTION __attribute__((flatten))
#endif

// Unrolls the loop that follows; 16 must be at least its constant number of iterations.
#define POWERSGD_UNROLL _Pragma("GCC unroll 16")

template <class T, size_t kBytes>
struct VectorOf {
  typedef T Type __attribute__((vector_size(kBytes)));
  typedef T Unaligned __attribute__((vector_size(kBytes), aligned(1), may_alias));
};

template <class T>
using Vector = typename VectorOf<T, kVectorBytes>::Type;
using Floats = Vector<float>;
using Doubles = Vector<double>;

// 32-bit words, and as many 16-bit words in half the bytes.
using Words = Vector<uint32_t>;
using HalfWords = VectorOf<uint16_t, kVectorBytes / 2>::Type;

template <class T>
constexpr ptrdiff_t kLanes = static_cast<ptrdiff_t>(kVectorBytes / sizeof(T));

template <class T>
inline Vector<T> load(const T* source) {
  return *reinterpret_cast<const typename VectorOf<T, kVectorBytes>::Unaligned*>(source);
}

template <class T>
inline void store(T* target, const Vector<T>& value) {
  *reinterpret_cast<typename VectorOf<T, kVectorBytes>::Unaligned*>(target) = value;
}

// Returns a vector with x in all lanes. The difference keeps the sign of a zero; a sum does not.
template <class T>
inline Vector<T> broadcast(T x) {
  return x - Vector<T>{};
}

// A vector of elements of a and b at constant positions: those of b follow those of a. Mask is the
// vector of integers of the same size.
#if defined(__clang__)
#define POWERSGD_SHUFFLE(Mask, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define POWERSGD_SHUFFLE(Mask, a, b, ...) __builtin_shuffle(a, b, Mask{__VA_ARGS__})
#endif

// Returns the bits of one vector type read as another of the same size.
template <class To, class From>
inline To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "a reinterpretation keeps the size");
  return reinterpret_cast<To>(from);
}

}  // namespace powersgd::kernels::cpu::POWERSGD_TARGET
