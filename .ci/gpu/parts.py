# SPDX-License-Identifier: BSD-3-Clause
"""The parts of the two calls, the most important first."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import outcomes
from commands import (
    EXTENSION,
    KERNELS_CUDA,
    LOGS,
    PROGRAMS,
    PYTHON,
    bench_kernels,
    profiled,
    program,
    pytest,
    sanitized,
    suites,
)
from runner import Command, Part, Verdict

SMOKE = "tests/python/training/test_smoke.py"
NCCL = "tests/python/backend/test_cuda_nccl.py"
# If this test fails, nothing that uses NCCL will work.
TWO_RANKS = f"{SMOKE}::test_two_ranks_agree[cuda-auto]"
OF_PYTHON = ("smoke", "test-nccl", "test-cuda")

SERIAL = {"POWERSGD_DEPENDENT_LAUNCH": "0"}
# Under compute-sanitizer. These shapes take every path through the kernels: aligned, short and long
# rows, and both kinds of products. A dead column takes orthogonalize through all passes.
CHECKED = [
    *(
        f"All/{suite}.MatchesTheReference/*{shape}"
        for suite in ("Project", "BackProject", "Reconstruct")
        for shape in ("_300x256r4", "_600x136r16", "_1030x36r32", "_9x2100r4")
    ),
    "All/Orthogonalize.RandomColumns/*",
    "All/Orthogonalize.ZeroColumnIsReplaced/*",
]
CHECKED_KERNELS = [KERNELS_CUDA, f"--gtest_filter={':'.join(CHECKED)}"]


def first_call() -> list[Part]:
    every = sorted(map(str, Path("tests/python").glob("*/test_cuda*.py")))
    others = [file for file in every if file != NCCL]
    return [
        Part("kernels", 40, suites, PROGRAMS, at_once=8, tests=outcomes.googletest),
        bench_kernels("kernels-float32", 35, "--kinds float32 --ranks 4 1 16 32"),
        # Python parts start once the extension is built. Until then, the others run.
        pytest("smoke", 120, [SMOKE, "-k", "cuda"]),
        bench_kernels("kernels-products", 25, "--kinds float32 --ranks 16 32 --products bfloat16"),
        bench_kernels("kernels-serial", 20, "--kinds float32 --ranks 4 32", SERIAL),
        bench_kernels("kernels-bfloat16", 25, "--kinds bfloat16 bfloat16/bfloat16"),
        pytest("test-nccl", 60, [NCCL, "--maxfail=2"]),
        pytest("test-cuda", 170, [*others, "--maxfail=3"]),
        bench_stages(),
        sanitized("memcheck", 40, "memcheck", CHECKED_KERNELS, PROGRAMS),
    ]


def bench_stages() -> Part:
    words = "benchmarks/bench_stages.py --device cuda --models gpt2 llama resnet50 --ranks 4 32"
    return program("bench-stages", 60, words, {"": {}})


def bench_cluster(model: str, limit: float) -> Part:
    """A part of bench_cluster.py, with methods whose processes together fit into 80 GB."""
    words = f"benchmarks/bench_cluster.py --device cuda --models {model} --rounds 2 --steps 4"
    words += " --methods none plain hook:4 attached+bucket_cap_mb=100:4"
    words += f" --logs {LOGS}/bench-cluster"
    return program(f"bench-cluster-{model}", limit, words, {"": {}})


def after_smoke(verdict: Verdict, pending: list[Part]) -> list[Part]:
    """Returns the parts left after the smoke test. If NCCL fails, the first one finds out why."""
    if not verdict.is_failure or (verdict.failed and TWO_RANKS not in verdict.failed):
        return pending
    variants = {
        "nccl-debug": {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"{LOGS}/nccl.%p.txt"},
        "serial": SERIAL,
        "blocking": {"CUDA_LAUNCH_BLOCKING": "1"},
    }
    reason = pytest("smoke-again", 60, [TWO_RANKS], variants)
    return [reason, *sorted(pending, key=lambda part: part.name != "bench-stages")]


def second_call(first: Mapping[str, Verdict]) -> list[Part]:
    """First the tests that failed in the first call, then what it had no time for."""
    left = [part for part in first_call() if first.get(part.name, Verdict("")).no_time]
    gpt2 = "--kinds float32 --models gpt2 --ranks 4"
    parts = [
        *_again(first),
        *left,
        program("bench-step", 50, "benchmarks/bench_step.py", {"": {}, "-serial": SERIAL}),
        bench_cluster("gpt2", 90),
        bench_cluster("resnet50", 70),
        profiled("ncu", 40, ["project", "orthogonalize", "back_project", "reconstruct"], gpt2),
        program("bench-model", 60, "benchmarks/bench_model.py", {"": {}}),
        sanitized("racecheck", 40, "racecheck", CHECKED_KERNELS, PROGRAMS),
    ]
    return list({part.name: part for part in parts}.values())


def _again(first: Mapping[str, Verdict]) -> list[Part]:
    """Only the failed tests, without dependent launch, and the first of them under memcheck."""
    kernels = first["kernels"].failed[:20] if "kernels" in first else []
    python = [test for name in OF_PYTHON if name in first for test in first[name].failed][:6]
    parts = []
    if kernels:
        words = [KERNELS_CUDA, f"--gtest_filter={':'.join(kernels)}"]
        again = Command(words, SERIAL)
        parts.append(Part("kernels-again", 30, [again], PROGRAMS, tests=outcomes.googletest))
    if python:
        parts.append(pytest("tests-again", 75, python, {"": SERIAL}))
    if kernels:
        words = [KERNELS_CUDA, f"--gtest_filter={kernels[0]}"]
        parts.append(sanitized("memcheck-failed", 45, "memcheck", words, PROGRAMS))
    elif python:
        words = [PYTHON, "-m", "pytest", python[0]]
        parts.append(sanitized("memcheck-failed", 60, "memcheck", words, EXTENSION))
    if parts and not first.get("bench-stages", Verdict("")).ok:
        parts.append(bench_stages())
    return parts
