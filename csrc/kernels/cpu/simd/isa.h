// SPDX-License-Identifier: BSD-3-Clause
#pragma once

namespace powersgd::kernels::cpu {

// The instruction sets that the stages are compiled for. kBaseline is what every CPU of the
// architecture has: NEON on 64-bit ARM. Only x86-64 has others.
enum class Isa { kBaseline, kAvx2, kAvx512 };

// Returns whether this machine's CPU has the instruction set.
bool is_supported(Isa isa);

// Returns the widest instruction set that this machine's CPU has.
Isa best_isa();

}  // namespace powersgd::kernels::cpu
