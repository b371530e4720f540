// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "kernels/cpu/simd/isa.h"
#include "powersgd/kernels/kernels.h"
#include "powersgd/kernels/packets.h"

// The stages, once per instruction set. The functions of powersgd/kernels.h and powersgd/packets.h
// run on the widest one of this machine; tests run them all.
namespace powersgd::kernels::cpu {

struct StageFunctions {
  using Stage = void (*)(const Bucket& bucket, const ParallelFor& parallel_for);

  Stage project;
  Stage orthogonalize;
  Stage back_project;
  Stage reconstruct;
};

struct PacketFunctions {
  using Function = void (*)(const Packets& packets, const ParallelFor& parallel_for);

  Function quantize;
  Function requantize;
  Function dequantize;
};

// Each is defined by a file of csrc/kernels/cpu/targets.
namespace baseline {
extern const StageFunctions kStages;
extern const PacketFunctions kPackets;
}  // namespace baseline
namespace avx2 {
extern const StageFunctions kStages;
extern const PacketFunctions kPackets;
}  // namespace avx2
namespace avx512 {
extern const StageFunctions kStages;
extern const PacketFunctions kPackets;
}  // namespace avx512

// Returns the stages on an instruction set that is_supported.
const StageFunctions& stages_on(Isa isa);
const PacketFunctions& packets_on(Isa isa);

}  // namespace powersgd::kernels::cpu
