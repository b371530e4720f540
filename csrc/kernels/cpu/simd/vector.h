// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/cpu/simd/isa.h"

// One source for every instruction set: kernels are templates over an Arch, written with GCC's
// vector extensions and always inlined into Arch::enter, which carries the target attribute. On a
// machine that is not x86-64 only the baseline is built.
//
// The result of a kernel may depend on Arch through the number of lanes it sums over and through
// FMA. orthogonalize.cpp and reconstruct.cpp do not let it: see exact.h.
namespace powersgd::kernels::cpu {

// The ABI of a wide vector depends on the target. Nothing here is ever called: it is all inlined.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"
#endif

#define POWERSGD_INLINE __attribute__((always_inline)) inline

// After the parameters of a lambda.
#define POWERSGD_INLINE_LAMBDA __attribute__((always_inline))

// Unrolls the loop that follows; `count` must be at least its (constant) number of iterations.
#define POWERSGD_UNROLL _Pragma("GCC unroll 16")

struct Baseline {
  static constexpr size_t kVectorBytes = 16;
  static constexpr int kRegisters = 16;
  static constexpr bool kHasAvx = false;  // AVX2, FMA and F16C
  template <class Kernel>
  static void enter(const Kernel& kernel) {
    kernel.template run<Baseline>();
  }
};

#if defined(__x86_64__)
struct Avx2 {
  static constexpr size_t kVectorBytes = 32;
  static constexpr int kRegisters = 16;
  static constexpr bool kHasAvx = true;
  template <class Kernel>
  __attribute__((target("avx2,fma,f16c"), noinline)) static void enter(const Kernel& kernel) {
    kernel.template run<Avx2>();
  }
};

struct Avx512 {
  static constexpr size_t kVectorBytes = 64;
  static constexpr int kRegisters = 32;
  static constexpr bool kHasAvx = true;
  template <class Kernel>
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"), noinline)) static void
  enter(const Kernel& kernel) {
    kernel.template run<Avx512>();
  }
};
#endif

// Kernel: a small struct of arguments with `template <class Arch> POWERSGD_INLINE void run()
// const`.
template <class Kernel>
void run_on(Isa isa, const Kernel& kernel) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx512) return Avx512::enter(kernel);
  if (isa == Isa::kAvx2) return Avx2::enter(kernel);
#endif
  static_cast<void>(isa);
  Baseline::enter(kernel);
}

template <class T, size_t kBytes>
struct VectorOf {
  typedef T Type __attribute__((vector_size(kBytes)));
  typedef T Unaligned __attribute__((vector_size(kBytes), aligned(1), may_alias));
};

template <class Arch, class T>
using Vector = typename VectorOf<T, Arch::kVectorBytes>::Type;

template <class Arch, class T>
constexpr ptrdiff_t kLanes = static_cast<ptrdiff_t>(Arch::kVectorBytes / sizeof(T));

template <class Arch, class T>
POWERSGD_INLINE Vector<Arch, T> load(const T* source) {
  return *reinterpret_cast<const typename VectorOf<T, Arch::kVectorBytes>::Unaligned*>(source);
}

template <class Arch, class T>
POWERSGD_INLINE void store(T* target, const Vector<Arch, T>& value) {
  *reinterpret_cast<typename VectorOf<T, Arch::kVectorBytes>::Unaligned*>(target) = value;
}

// x in all lanes. GCC 12 goes through memory, hence the instructions by name.
template <class Arch, class T>
POWERSGD_INLINE Vector<Arch, T> broadcast(T x) {
  Vector<Arch, T> result;
  if constexpr (Arch::kHasAvx && std::is_same_v<T, float>) {
    asm("vbroadcastss %1, %0" : "=v"(result) : "vm"(x));
  } else if constexpr (Arch::kHasAvx && std::is_same_v<T, double>) {
    asm("vbroadcastsd %1, %0" : "=v"(result) : "vm"(x));
  } else {
    result = x - Vector<Arch, T>{};  // not +, for the sake of -0
  }
  return result;
}

// A vector of elements of a and b, by constant positions: those of b follow those of a. Mask is the
// vector of integers of the same size.
#if defined(__clang__)
#define POWERSGD_SHUFFLE(Mask, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define POWERSGD_SHUFFLE(Mask, a, b, ...) __builtin_shuffle(a, b, Mask{__VA_ARGS__})
#endif

// Bits of one vector type read as another of the same size.
template <class To, class From>
POWERSGD_INLINE To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "a reinterpretation keeps the size");
  return reinterpret_cast<To>(from);
}

// result = an instruction on two vectors, its name without "ps" or "pd". GCC 12 has none for a
// comparison and a choice in 512 bits, hence the instructions by name.
#define POWERSGD_INSTRUCTION(result, name, immediate, a, b)                  \
  if constexpr (sizeof(result[0]) == sizeof(double)) {                       \
    asm(name "pd " immediate "%2, %1, %0" : "=v"(result) : "v"(a), "vm"(b)); \
  } else {                                                                   \
    asm(name "ps " immediate "%2, %1, %0" : "=v"(result) : "v"(a), "vm"(b)); \
  }

// The greater of each pair of elements, which are not NaN.
template <class Arch, class V>
POWERSGD_INLINE V greater(const V& a, const V& b) {
  if constexpr (Arch::kHasAvx) {
    V result;
    POWERSGD_INSTRUCTION(result, "vmax", "", a, b);
    return result;
  } else {
    return a > b ? a : b;
  }
}

template <class Arch, class V>
POWERSGD_INLINE V lesser(const V& a, const V& b) {
  if constexpr (Arch::kHasAvx) {
    V result;
    POWERSGD_INSTRUCTION(result, "vmin", "", a, b);
    return result;
  } else {
    return a < b ? a : b;
  }
}

// Values of at most `largest` in magnitude. Not for NaN.
template <class Arch, class V>
POWERSGD_INLINE V within(const V& value, const V& largest) {
  if constexpr (Arch::kVectorBytes == 64) {
    V result;  // the lesser of both in magnitude, with the sign of the first
    POWERSGD_INSTRUCTION(result, "vrange", "$2, ", value, largest);
    return result;
  } else {
    return lesser<Arch>(greater<Arch>(value, -largest), largest);
  }
}

// Stores past the caches, to an address aligned to the vector. stream_fence() before others may
// read.
template <class Arch, class V>
POWERSGD_INLINE void stream(void* target, const V& value) {
  V& memory = *static_cast<V*>(target);
  if constexpr (Arch::kHasAvx) {
    asm("vmovntps %1, %0" : "=m"(memory) : "v"(value));
  } else {
    memory = value;
  }
}

template <class Arch>
POWERSGD_INLINE void stream_fence() {
  if constexpr (Arch::kHasAvx) asm volatile("sfence" ::: "memory");
}

}  // namespace powersgd::kernels::cpu
