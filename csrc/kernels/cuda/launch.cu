// SPDX-License-Identifier: BSD-3-Clause
#include "kernels/cuda/launch.cuh"

namespace powersgd::kernels::cuda {

int64_t launch_count() { return launches; }

}  // namespace powersgd::kernels::cuda
