// SPDX-License-Identifier: BSD-3-Clause
#pragma once

// The operations that have no operator on vectors, one file per target with the same functions:
//
//   broadcast(x)                           x in all lanes
//   multiply_add(a, b, c)                  a * b + c, by FMA where the target has it
//   multiply_add_reproducibly(a, b, c)     a * b + c with the same bits on every target
//   greater(a, b), lesser(a, b)            the maximum and the minimum by lane; neither may be NaN
//   within(value, largest)                 value, but of at most `largest` in magnitude; no NaN
//   widened(half_words), narrowed(words)   16-bit words to and from 32-bit words
//   from_half(half_words), to_half(floats) float16 to and from float32, rounded to nearest even
//   store_nontemporal(target, value)       a store past the caches of a vector or half of one, to
//                                          an address that is aligned to it
//   nontemporal_fence()                    lets other threads read what was stored so
//
// broadcast and multiply_add_reproducibly take doubles too. The latter rounds floats once and
// doubles twice.
#if POWERSGD_VECTOR_BYTES == 64
#include "kernels/cpu/simd/avx512.h"
#elif POWERSGD_VECTOR_BYTES == 32
#include "kernels/cpu/simd/avx2.h"
#elif defined(__aarch64__)
#include "kernels/cpu/simd/neon.h"
#else
#include "kernels/cpu/simd/baseline.h"
#endif
