// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>

#include "simt/simt.h"

// Instead of csrc/kernels/cuda/load_acquire.cuh.
namespace powersgd::kernels::cuda {

inline uint64_t load_acquire(const uint64_t* counter) {
  simt::order_acquire(counter);
  return __atomic_load_n(counter, __ATOMIC_RELAXED);
}

inline void release_fence() { simt::fence(); }

}  // namespace powersgd::kernels::cuda
