// SPDX-License-Identifier: BSD-3-Clause
#pragma once

// Every header of targets/all_stages.inl that is the same for all targets. A target's file includes
// them before the target's options are in force: the linker keeps one copy of an inline function
// that several files compile, and a copy for AVX-512 must not end up in code for any CPU.
#if defined(__x86_64__)
// GCC 12 warns about its own __Y, a vector that is undefined on purpose.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include <algorithm>
#include <atomic>
#include <cfloat>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <type_traits>
#include <utility>

#include "kernels/cpu/blocking/tiles.h"
#include "kernels/cpu/simd/storage.h"
#include "kernels/cpu/targets/stage_table.h"
#include "kernels/cpu/with_storage.h"
#include "kernels/shared/layout.h"
#include "kernels/shared/numerics.h"
#include "kernels/shared/packet_layout.h"
#include "kernels/shared/redraw.h"
#include "kernels/shared/steps.h"
#include "powersgd/kernels/kernels.h"
