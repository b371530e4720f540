// SPDX-License-Identifier: BSD-3-Clause
//
// All that is compiled once per target, with the target's options in force.
#include "kernels/cpu/simd/exact.h"

#include "kernels/cpu/back_project.inl"
#include "kernels/cpu/orthogonalize.inl"
#include "kernels/cpu/packets.inl"
#include "kernels/cpu/project.inl"
#include "kernels/cpu/reconstruct.inl"

const powersgd::kernels::cpu::StageFunctions powersgd::kernels::cpu::POWERSGD_TARGET::kStages = {
    project, orthogonalize, back_project, reconstruct};
const powersgd::kernels::cpu::PacketFunctions powersgd::kernels::cpu::POWERSGD_TARGET::kPackets = {
    quantize, requantize, dequantize};
