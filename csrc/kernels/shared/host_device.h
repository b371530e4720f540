// SPDX-License-Identifier: BSD-3-Clause
#pragma once

// Stands in front of functions that the CPU and the CUDA implementation share.
#if defined(__CUDACC__)
#define POWERSGD_HOST_DEVICE __host__ __device__
#else
#define POWERSGD_HOST_DEVICE
#endif
