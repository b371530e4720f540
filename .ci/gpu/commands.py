# SPDX-License-Identifier: BSD-3-Clause
"""The commands of the parts, grouped by the program that they run."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import outcomes
from runner import Command, Part

PYTHON = os.environ.get("PYTHON") or sys.executable
BUILD = Path("build/gpu")
OUTPUT = BUILD / "output"  # what goes into the archive
LOGS = OUTPUT / "logs"
KERNELS_CUDA = "build/gpu-programs/kernels_cuda"
BENCH_KERNELS = "build/gpu-programs/bench_kernels"

PROGRAMS, EXTENSION = "build-programs", "build-extension"
BUILDS = (PROGRAMS, EXTENSION)
_EXTENSION_STAMP = BUILD / "extension_made_from"
# Without POWERSGD_BUILD_CUDA=1, a missing toolkit would lead to a CPU-only build, which "succeeds".
_BUILD_EXTENSION = """
CUDA_HOME=$(.ci/cuda_home 2>&1) || { echo "$CUDA_HOME"; exit 77; }
export CUDA_HOME POWERSGD_BUILD_CUDA=1
"$1" setup.py build_ext --inplace && echo "$2" >"$3"
"""
# Without GoogleTest, the kernel benchmarks can still run.
_BUILD_PROGRAMS = """
nice .ci/gpu_programs
status=$?
[[ $status == 77 && -x $0 ]] || exit $status
"""


def builds(architecture: str) -> list[Part]:
    """The builds, which start immediately and run in parallel."""
    words = ["bash", "-c", _BUILD_PROGRAMS, BENCH_KERNELS]
    programs = [Command(words, {"ARCHITECTURE": architecture})]
    return [Part(EXTENSION, 200, _extension), Part(PROGRAMS, 200, programs)]


def _extension() -> list[Command]:
    """No commands if the sources are unchanged, by content: ninja would only compare file times."""
    made_from = _extension_hash()
    compiled = any(Path("python/torch_powersgd").glob("_C*.so"))
    stamp = _EXTENSION_STAMP
    if compiled and stamp.exists() and stamp.read_text().strip() == made_from:
        return []
    words = ["bash", "-c", _BUILD_EXTENSION, "build", PYTHON, made_from, str(stamp)]
    return [Command(words)]


def _extension_hash() -> str:
    sources = [Path("setup.py")]
    for folder in ("csrc", "include", "setup_support"):
        sources += [path for path in Path(folder).rglob("*") if path.suffix != ".pyc"]
    hashed = hashlib.sha256(PYTHON.encode())
    for source in sorted(filter(Path.is_file, sources)):
        hashed.update(str(source).encode() + source.read_bytes())
    return hashed.hexdigest()


def suites() -> list[Command]:
    """One process for each suite of kernels_cuda: an illegal access fails everything after it."""
    whole = [KERNELS_CUDA, "--gtest_list_tests"]
    try:
        listed = subprocess.run(whole, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return [Command(whole)]  # its exit status says why
    names = [line for line in listed.stdout.split("\n") if line.endswith(".")]
    return [
        Command([KERNELS_CUDA, f"--gtest_filter={name}*"], name=name.strip(".").replace("/", "_"))
        for name in names
    ] or [Command(whole)]


def bench_kernels(
    name: str, limit: float, words: str, env: Mapping[str, str] | None = None
) -> Part:
    """A part of bench_kernels. Builds may run alongside: launches are queued on a busy device."""
    command = Command([BENCH_KERNELS, *words.split(), "--json", _json(name)], env or {})
    return Part(name, limit, [command], PROGRAMS)


def program(name: str, limit: float, words: str, variants: Mapping[str, Mapping[str, str]]) -> Part:
    """A Python benchmark in these environments. It waits for builds, which slow its launches."""
    commands = [
        Command([PYTHON, *words.split(), "--json", _json(name + variant)], env, name + variant)
        for variant, env in variants.items()
    ]
    return Part(name, limit, commands, EXTENSION, after=BUILDS)


def pytest(
    name: str,
    limit: float,
    words: Sequence[str],
    variants: Mapping[str, Mapping[str, str]] | None = None,
) -> Part:
    """Python tests, in all of these environments at the same time."""
    shared = ["-m", "pytest", "-v", "--tb=short", "--durations=5", "-p", "no:cacheprovider"]
    commands = [
        Command([PYTHON, *shared, *words], env, variant)
        for variant, env in (variants or {"": {}}).items()
    ]
    at_once = len(commands)
    return Part(name, limit, commands, EXTENSION, at_once=at_once, tests=outcomes.pytest)


def sanitized(name: str, limit: float, tool: str, words: Sequence[str], needs: str) -> Part:
    """A command under compute-sanitizer. It waits for the extension, whose tests run first."""
    options = ["--tool", tool, "--target-processes", "all", "--error-exitcode", "1"]
    command = Command(["compute-sanitizer", *options, *words])
    return Part(name, limit, [command], needs, after=[EXTENSION])


def profiled(name: str, limit: float, kernels: Sequence[str], words: str) -> Part:
    """One launch of each kernel under ncu, after a warm-up. The clocks are not changed."""
    ncu = "ncu --clock-control none --set detailed --kill yes --launch-skip 20 --launch-count 1"
    commands = [
        Command(
            [*ncu.split(), "-k", f"regex:^{kernel}", BENCH_KERNELS, *words.split()], name=kernel
        )
        for kernel in kernels
    ]
    return Part(name, limit, commands, PROGRAMS)


def _json(name: str) -> str:
    return str(OUTPUT / f"{name.replace('-', '_')}.json")
