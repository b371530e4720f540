// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstddef>

#include "simt/simt.h"

// The part of CUDA's header of this name that the kernels use.

// NOLINTBEGIN: the names below are CUDA's.
inline void __pipeline_memcpy_async(void* to, const void* from, size_t bytes) {
  simt::copy_async(to, from, bytes);
}
inline void __pipeline_commit() { simt::commit_copies(); }
inline void __pipeline_wait_prior(size_t groups_left) { simt::await_copies(groups_left); }
// NOLINTEND
