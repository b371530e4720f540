# SPDX-License-Identifier: BSD-3-Clause
"""Prints the resources that CUDA kernels use, from the output of ``nvcc -Xptxas -v`` on stdin.

    c++filt <log | python .ci/nvcc_report.py

The input must be demangled by c++filt. The exit status is 1 if a kernel spills on one of the
architectures that the kernels are tuned for, or one of the default matrix rank on any.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass

THREADS = 256  # of a block: kThreads in csrc/kernels/cuda/block_tiles.h
WARPS_OF_A_BLOCK = THREADS // 32
REGISTERS = 16384  # of each of the four parts of a multiprocessor
TUNED = (80, 90)  # no kernel may spill on these
DEFAULT_RANK = "<16"  # the template arguments of kernels that may spill on none begin with this
NAME_WIDTH = 60


@dataclass(frozen=True)
class Limits:
    """A multiprocessor's limits. Shared memory is in KB, of which each block loses ``reserved``."""

    warps: int
    blocks: int
    shared: int
    shared_of_a_block: int
    reserved: int = 1


# From the table of compute capabilities in the CUDA C++ Programming Guide.
LIMITS = {
    75: Limits(32, 16, 64, 64, reserved=0),
    80: Limits(64, 32, 164, 163),
    86: Limits(48, 16, 100, 99),
    89: Limits(48, 24, 100, 99),
    90: Limits(64, 32, 228, 227),
    100: Limits(64, 32, 228, 227),
    103: Limits(64, 32, 228, 227),
    120: Limits(48, 24, 100, 99),
}


@dataclass(frozen=True)
class Kernel:
    registers: int  # of a thread
    stack: int  # bytes of a thread
    spilled: int  # bytes that a thread stores and reloads
    shared: int  # static bytes of a block

    def warps(self, limits: Limits) -> int:
        """The number of warps that are resident on a multiprocessor."""
        of_a_warp = -(-self.registers * 32 // 256) * 256
        by_registers = 4 * (REGISTERS // of_a_warp) // WARPS_OF_A_BLOCK
        static = self.shared / 1024 + limits.reserved
        by_shared = int(limits.shared / static) if static else limits.blocks
        by_warps = limits.warps // WARPS_OF_A_BLOCK
        return WARPS_OF_A_BLOCK * min(by_registers, by_shared, by_warps, limits.blocks)


def room(warps: int, limits: Limits) -> int:
    """The KB of shared memory that a block may request while this many warps stay resident."""
    blocks = warps // WARPS_OF_A_BLOCK
    return min(limits.shared // blocks - limits.reserved, limits.shared_of_a_block)


def short(symbol: str) -> str:
    """The name of a kernel without its namespaces and arguments."""
    for words, shorter in [
        ("(anonymous namespace)::", ""),
        ("powersgd::kernels::cuda::", ""),
        ("unsigned short", "u16"),
        ("void ", ""),
    ]:
        symbol = symbol.replace(words, shorter)
    symbol = re.sub(r"\((\w+)\)(\d+)", r"\1 \2", symbol)  # an enumerator: "(Way)1"
    return symbol.split("(")[0]


def read(lines: Iterable[str]) -> dict[tuple[str, int], Kernel]:
    """The kernels by name and architecture."""
    kernels: dict[tuple[str, int], Kernel] = {}
    name, architecture, stack, spilled = "", 0, 0, 0
    for line in lines:
        if found := re.search(r"Compiling entry function .(.*). for .sm_(\d+)", line):
            name, architecture = short(found[1]), int(found[2])
        elif found := re.search(r"(\d+) bytes stack frame, (\d+) .* stores, (\d+)", line):
            stack, spilled = int(found[1]), int(found[2]) + int(found[3])
        elif name and (found := re.search(r"Used (\d+) registers", line)):
            smem = re.search(r"(\d+) bytes smem", line)
            shared = int(smem[1]) if smem else 0
            kernels[name, architecture] = Kernel(int(found[1]), stack, spilled, shared)
            name = ""
    return kernels


def show(kernels: dict[tuple[str, int], Kernel]) -> list[str]:
    """Prints the table. Returns the kernels that spill and may not."""
    architectures = sorted({architecture for _, architecture in kernels})
    print(f"warps per multiprocessor ({THREADS} threads a block) / registers / stack / spilled")
    print("".ljust(NAME_WIDTH), *(f"sm_{a}".rjust(18) for a in architectures))
    bad = []
    resident: dict[int, set[int]] = {architecture: set() for architecture in architectures}
    for name in sorted({name for name, _ in kernels}):
        cells = []
        for architecture in architectures:
            kernel = kernels[name, architecture]
            warps = kernel.warps(LIMITS[architecture])
            resident[architecture].add(warps)
            cell = f"{warps} / {kernel.registers} / {kernel.stack} / {kernel.spilled}"
            cells.append(cell.rjust(18))
            if kernel.spilled and (architecture in TUNED or DEFAULT_RANK in name):
                bad.append(f"{name} on sm_{architecture}")
        print(name.ljust(NAME_WIDTH), *cells)
    for architecture, counts in resident.items():
        limits = LIMITS[architecture]
        rooms = ", ".join(f"{w}: {room(w, limits)} KB" for w in sorted(counts) if w)
        print(f"sm_{architecture}: dynamic shared memory per block, by resident warps: {rooms}")
    return bad


def main() -> None:
    kernels = read(sys.stdin)
    if not kernels:
        sys.exit("no kernel in the input")
    if bad := show(kernels):
        sys.exit(f"kernels spill: {', '.join(bad)}")


if __name__ == "__main__":
    main()
