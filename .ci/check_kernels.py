# SPDX-License-Identifier: BSD-3-Clause
"""Compiles the CUDA kernels, and checks what no test without a GPU can find. It needs nvcc.

    python3 .ci/check_kernels.py        JOBS=2

It prints each kernel's registers and local memory. On the architectures that they are tuned for,
kernels must have no local memory, and so no spills. Those of the default matrix rank must have none
on any. In the PTX for architecture 90, it checks how kernels order memory where the emulation of
tests/cpp/simt cannot: there, load_acquire.cuh is replaced, one launch ends before the next begins,
and no compiler chooses read-only loads.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
ARCHITECTURES = (80, 90, 100, 120)  # those of a release that have the instructions of 8.0
TUNED = ("80", "90")
DEFAULT_RANK = "<16"  # begins the template arguments of its kernels
# The kernels that wait for orthogonalize, and how many loads of their tile and their matrix precede
# the wait. So may those of M, which are marked (.cs).
EARLY_LOADS = {"back_project": 15, "back_project_bfloat16": 3}


def name_of(symbol: str) -> str:
    """Such as `project_kernel<4, (Way)1, float, float>`, of a demangled symbol."""
    symbol = re.sub(r"\(anonymous namespace\)::|\b(powersgd|kernels|cuda)::", "", symbol)
    found = re.search(r"\w+_kernel(<.*>)?", symbol)
    return found[0] if found else symbol


def spills(log: str) -> list[str]:
    """Prints a table of what `nvcc -Xptxas -v` says. Returns the kernels that must not spill."""
    pattern = (
        r"Compiling entry function '(.*)' for 'sm_(\d+)'.*\n.*\n"
        r" *(\d+) bytes stack frame.*\n.*Used (\d+) registers"
    )
    rows: dict[str, dict[str, str]] = {}
    faults = []
    for symbol, architecture, local, registers in re.findall(pattern, log):
        name = name_of(symbol)
        rows.setdefault(name, {})[architecture] = f"{registers}, {local}"
        if local != "0" and (architecture in TUNED or DEFAULT_RANK in name):
            faults.append(f"{name}: {local} bytes of local memory on sm_{architecture}")
    print("registers and bytes of local memory, for each architecture")
    for name, cells in sorted(rows.items()):
        print(name.ljust(66), *(f"{each}: {cells[each]}".ljust(14) for each in cells))
    return faults if rows else ["nvcc has compiled no kernel"]


class Kernel(NamedTuple):
    name: str
    code: list[str]  # its instructions and labels

    @property
    def family(self) -> str:
        return self.name.split("<")[0].removesuffix("_kernel")

    def having(self, pattern: str) -> list[int]:
        """The indices of the instructions that match."""
        return [i for i, each in enumerate(self.code) if re.search(pattern, each)]

    def before(self, pattern: str) -> list[str]:
        """The instructions that may run before any that matches has run."""
        seen: set[int] = set()
        to_visit = [0]
        while to_visit:
            i = to_visit.pop()
            if i in seen or i >= len(self.code) or re.search(pattern, self.code[i]):
                continue
            seen.add(i)
            branch = re.search(r"\bbra(?:\.uni)?\s+(\S+);", self.code[i])
            if branch:
                to_visit.append(self.code.index(f"{branch[1]}:"))
            if self.code[i].startswith("@") or not (branch or self.code[i] == "ret;"):
                to_visit.append(i + 1)
        return [self.code[i] for i in sorted(seen)]


def kernels_of(ptx: str) -> list[Kernel]:
    """The kernels in demangled PTX."""
    entries = re.findall(r"^(?:\.\w+ )*\.entry (.*)\($(?s:.*?)^{\n((?s:.*?))^}", ptx, re.MULTILINE)
    code = re.compile(r"^\s*([@\w].*;|\$\w+:)", re.MULTILINE)
    return [Kernel(name_of(symbol), code.findall(body)) for symbol, body in entries]


def early_accesses(kernel: Kernel) -> Iterator[str]:
    """Checks that kernels wait for their predecessor before they read what it has written."""
    if kernel.family not in EARLY_LOADS:
        return
    if not kernel.having("griddepcontrol.wait"):
        yield "it does not wait for its predecessor"
        return
    early = kernel.before("griddepcontrol.wait")
    for each in early:
        if re.search(r"\b(st|atom|red)\b(?!\S*\.shared)", each):
            yield f"before the wait for its predecessor: {each}"
    loads = [each for each in early if re.search(r"\bld\b(?!\S*\.(shared|param|cs)\b)", each)]
    if len(loads) > EARLY_LOADS[kernel.family]:
        yield f"{len(loads)} loads before the wait for its predecessor: {loads[-1]} ..."


def disorder(kernel: Kernel) -> Iterator[str]:
    """Checks how the blocks of a launch, and those of other launches, see what each has written."""
    for i in kernel.having(r"\bld\.global\.nc\b"):
        yield f"a load by the read-only path, which may be stale: {kernel.code[i]}"
    if kernel.having(r"\bnanosleep\b"):
        for needed in ("ld.acquire.gpu", "fence.acq_rel.gpu"):
            if not kernel.having(rf"\b{needed}\b"):
                yield f"it waits for other blocks, without {needed}"


def compile_kernels(source: Path, folder: str) -> str:
    """Compiles a source, keeps its PTX in the folder, and returns what nvcc says."""
    command = ["nvcc", "-std=c++17", "-O3", "-Iinclude", "-Icsrc", "-Xcompiler=-Wall", "-Xptxas=-v"]
    command += [f"-gencode=arch=compute_{each},code=sm_{each}" for each in ARCHITECTURES]
    command += ["--keep", f"--keep-dir={folder}", f"--output-file={folder}/{source.stem}.o"]
    ended = subprocess.run([*command, "-c", source], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    if ended.returncode != 0:
        raise SystemExit(f"{source.name} does not compile:\n{ended.stderr}")
    return ended.stderr


def demangled(texts: Iterable[str]) -> str:
    return subprocess.check_output("c++filt", input="".join(texts), text=True)


def main() -> int:
    sources = sorted(ROOT.glob("csrc/kernels/cuda/*.cu"), key=lambda file: -file.stat().st_size)
    jobs = int(os.environ.get("JOBS", "2"))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        log = demangled(pool.map(lambda source: compile_kernels(source, folder), sources))
        ptx = demangled(file.read_text() for file in Path(folder).glob("*_90.ptx"))
    faults = [line for line in log.splitlines() if "warning" in line.lower()]
    faults += spills(log)
    kernels = kernels_of(ptx)
    faults += [f"{k.name}: {each}" for k in kernels for each in (*early_accesses(k), *disorder(k))]
    faults += [] if kernels else ["nvcc has kept no PTX"]
    print("\n".join(faults) or "no faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
