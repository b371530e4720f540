// SPDX-License-Identifier: BSD-3-Clause
//
// The stages for any CPU.
#include "kernels/cpu/targets/common.h"

#define POWERSGD_TARGET baseline
#define POWERSGD_VECTOR_BYTES 16
#include "kernels/cpu/targets/all_stages.inl"
