# SPDX-License-Identifier: BSD-3-Clause
"""A machine for .ci/gpu whose GPU, compiler and Python are stand-ins.

They do nothing but end as a test wants it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from support.deadline import DEADLOCK
from support.repository import ROOT

# It notes what it was given in $STAND_INS/calls, writes what a program or a compiler would write,
# and ends as the file of its name in $STAND_INS/behaves says.
_STAND_IN = r"""#!/bin/bash
name=${0##*/}
case "$name $*" in
  "python3 setup.py"*) name=setup ;;
  "python3 -m pytest"*smoke*) name=smoke ;;
  "python3 -m pytest"*nccl*) name=nccl ;;
  "python3 -m pytest"*) name=pytest ;;
  "python3 benchmarks/"*) name=$(basename "$1" .py) ;;
esac
echo "$name|$POWERSGD_COMMIT|$POWERSGD_BUILD_CUDA|$CUDA_HOME|$*" >>"$STAND_INS/calls"
previous=
for word; do
  case "$name $previous" in
    *" --json")
      cp "$STAND_INS/json/$name" "$word" 2>/dev/null || echo '{"results": []}' >"$word" ;;
    "nvcc -o") cp "$0" "$word" ;;
    *compute_cap*) echo 9.0 ;;
  esac
  case "$name $word" in
    *" -print-file-name="*) echo /libgtest.a ;;
    "smoke "*.py | "nccl "*.py* | "pytest "*.py*) ending="= 1 passed in 0.1s =" ;;
    "bench_kernels --help") exit 2 ;;
  esac
  previous=$word
done
[[ $name != setup ]] || touch python/torch_powersgd/_C.so
[[ $name != nvcc || $* != *--dryrun* ]] || echo "#\$ _HERE_=$STAND_INS/toolkit/bin" >&2
[[ ! -x $STAND_INS/behaves/$name ]] || . "$STAND_INS/behaves/$name"
echo "${ending:-output of $name}"
"""
_PROGRAMS = ("nvidia-smi", "python3", "nvcc", "g++", "compute-sanitizer")
_TOOLS = (
    "basename bash cat cp cut dirname env find grep gzip head ls mkdir nice nproc printf rm sed sh"
    " sha256sum sleep sort tar timeout touch tr wc xargs"
)
_COPIED = (".ci", "include", "csrc/kernels/cuda", "tests/cpp/kernels")


@dataclass
class Ending:
    status: int
    output: str
    verdicts: dict[str, str]  # by the part
    summary: list[str]  # its lines
    results: Path


@dataclass
class Machine:
    """A copy of the scripts and sources, and a PATH of stand-ins and a few tools, without git."""

    root: Path
    stand_ins: Path
    environment: dict[str, str] = field(default_factory=dict)

    def behaves(self, program: str, script: str) -> None:
        """Lets a program run these lines of bash as its last."""
        file = self.stand_ins / "behaves" / program
        file.write_text(script)
        file.chmod(0o755)

    def lacks(self, program: str) -> None:
        (self.stand_ins / "bin" / program).unlink()

    def start(self, *words: str, **variables: str) -> subprocess.Popen[str]:
        """Starts a script of .ci; Python's are folders."""
        script = self.root / ".ci" / words[0]
        python = [sys.executable] if script.is_dir() else []
        return subprocess.Popen(
            [*python, script, *words[1:]],
            env={**self.environment, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def call(self, *words: str, **variables: str) -> Ending:
        """Runs .ci/gpu."""
        with self.start("gpu", *words, JOBS="2", **variables) as process:
            output, _ = process.communicate(timeout=DEADLOCK)
        results = self.root / "results"
        summary = results / "summary.txt"
        return Ending(
            process.returncode,
            output,
            dict(re.findall(r"^== (\S+) \d+ s: (.*)$", output, re.MULTILINE)),
            summary.read_text().splitlines() if summary.exists() else [],
            results,
        )

    def programs(self, **variables: str) -> str:
        """Runs .ci/gpu_programs; returns its output."""
        with self.start("gpu_programs", **variables) as process:
            return process.communicate(timeout=DEADLOCK)[0]

    def calls(self, program: str) -> list[dict[str, str]]:
        names = ("name", "commit", "build_cuda", "home", "words")
        file = self.stand_ins / "calls"
        lines = file.read_text().splitlines() if file.exists() else []
        calls = [dict(zip(names, line.split("|", 4), strict=True)) for line in lines]
        return [call for call in calls if call["name"] == program]


def make_machine(folder: Path) -> Machine:
    root, stand_ins = folder / "tree", folder / "stand_ins"
    for name in _COPIED:
        shutil.copytree(ROOT / name, root / name)
    for name in ("csrc/core", "csrc/kernels/shared", "benchmarks/kernels", "python/torch_powersgd"):
        (root / name).mkdir(parents=True)
    for file in ROOT.glob("tests/python/*/test_cuda*.py"):
        (root / file.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        (root / file.relative_to(ROOT)).touch()
    for name in ("csrc/core/options.cpp", "csrc/kernels/shared/packet_layout.cpp", "setup.py"):
        (root / name).touch()
    (root / "benchmarks/bench_kernels.cu").touch()
    for name in ("behaves", "json", "bin", "toolkit/bin"):
        (stand_ins / name).mkdir(parents=True)
    for path in [*(stand_ins / "bin" / name for name in _PROGRAMS), stand_ins / "toolkit/bin/nvcc"]:
        path.write_text(_STAND_IN)
        path.chmod(0o755)
    for name in _TOOLS.split():
        found = shutil.which(name)
        assert found, name
        (stand_ins / "bin" / name).symlink_to(found)
    environment = {
        "PATH": str(stand_ins / "bin"),
        "STAND_INS": str(stand_ins),
        "HOME": "/",
        "PYTHON": "python3",
        "RESULTS": str(root / "results"),
    }
    return Machine(root, stand_ins, environment)
