// SPDX-License-Identifier: BSD-3-Clause
#pragma once

namespace powersgd::kernels::cpu {

// The instruction sets that the stages are compiled for.
enum class Isa { kBaseline, kAvx2, kAvx512 };

bool is_supported(Isa isa);
Isa best_isa();

}  // namespace powersgd::kernels::cpu
