// SPDX-License-Identifier: BSD-3-Clause
//
// The stages for CPUs with AVX-512.
#include "kernels/cpu/targets/common.h"

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(                                                    \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#endif

#define POWERSGD_TARGET avx512
#define POWERSGD_VECTOR_BYTES 64
#include "kernels/cpu/targets/all_stages.inl"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
