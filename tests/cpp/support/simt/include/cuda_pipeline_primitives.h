// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstddef>
#include <cstring>

#include "support/simt/simt.h"

// The part of CUDA's header of this name that the kernels use. A copy is made at once.

// NOLINTBEGIN: the names below are CUDA's.
inline void __pipeline_memcpy_async(void* to, const void* from, size_t bytes) {
  std::memcpy(to, from, bytes);
  simt::count_async_copy(bytes);
}
inline void __pipeline_commit() {}
inline void __pipeline_wait_prior(size_t) {}
// NOLINTEND
