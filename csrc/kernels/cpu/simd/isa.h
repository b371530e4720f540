// SPDX-License-Identifier: BSD-3-Clause
#pragma once

namespace powersgd::kernels::cpu {

// The instruction sets that the stages are compiled for. kBaseline is what every CPU of the
// architecture has: NEON on 64-bit ARM. A machine that is not x86-64 has no other.
enum class Isa { kBaseline, kAvx2, kAvx512 };

// Returns whether this machine's CPU has the instruction set.
bool is_supported(Isa isa);

// Returns the widest instruction set that this machine's CPU has.
Isa best_isa();

}  // namespace powersgd::kernels::cpu
