# SPDX-License-Identifier: BSD-3-Clause
"""The parts of the two calls. What decides most comes first."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from call import OK, Part

_PROGRAM = "build/gpu-programs"
PROGRAMS, EXTENSION = "build-programs", "build-extension"
# These shapes take every path through the kernels: aligned, short and long rows, and both kinds of
# products.
_SHAPES = ("300x256r4", "600x136r16", "1030x36r32", "9x2100r4")
_STAGES_OF_ALL_SHAPES = ("Project", "BackProject", "Reconstruct")
CHECKED = [f"All/{s}.MatchesTheReference/*_{x}" for s in _STAGES_OF_ALL_SHAPES for x in _SHAPES]
CHECKED += [f"All/Orthogonalize.{test}/*" for test in ("RandomColumns", "ZeroColumnStaysZero")]
_BUILD_EXTENSION = """
CUDA_HOME=$(.ci/cuda_home 2>&1) || { echo "$CUDA_HOME"; exit 77; }
CUDA_HOME=$CUDA_HOME POWERSGD_BUILD_CUDA=1 "$PYTHON" setup.py build_ext --inplace
"""
# Eight processes, as an illegal access fails all that comes after it.
_SHARDS = """
for i in {0..7}; do GTEST_TOTAL_SHARDS=8 GTEST_SHARD_INDEX=$i PROGRAM/kernels_cuda & ids+=($!); done
for id in ${ids[@]}; do wait $id || status=$?; done; exit ${status:-0}
"""
_OTHER_TESTS = "$(ls tests/python/*/test_cuda*.py | grep -v -e nccl -e deaths)"


def builds(prebuilt: bool) -> list[Part]:
    extension = Part(EXTENSION, 200, "true" if prebuilt else _BUILD_EXTENSION)
    return [extension, Part(PROGRAMS, 200, "nice .ci/gpu_programs")]


def _checks() -> list[Part]:
    parts = []
    for architecture in ("80", "75"):  # of Ampere and Turing; the driver compiles it for this GPU
        build = f"CODE=compute ARCHITECTURE={architecture} .ci/gpu_programs || exit 77"
        shards = _SHARDS.replace("PROGRAM", f"{_PROGRAM}-ptx{architecture}")
        parts.append(Part(f"ptx-{architecture}", 90, build + shards, beside=True))
    checked = f"{_PROGRAM}/kernels_cuda {shlex.quote('--gtest_filter=' + ':'.join(CHECKED))}"
    for tool in ("racecheck", "synccheck", "memcheck"):
        command = f"compute-sanitizer --tool {tool} --error-exitcode 1 {checked}"
        parts.append(Part(tool, 60, command, PROGRAMS, beside=True))
    return parts


def _tests(name: str, limit: float, words: str) -> Part:
    """Tests in Python; in the second call, only those that failed."""
    pytest = '"$PYTHON" -m pytest -v --tb=short --durations=5 -rfE'
    words += ' --last-failed -o cache_dir="$OUTPUT/pytest"'
    return Part(name, limit, f"{pytest} {words}", EXTENSION)


def _bench(name: str, limit: float, words: str) -> Part:
    """A benchmark in Python, which writes $OUTPUT/NAME.json."""
    command = f'"$PYTHON" benchmarks/{words} --json "$OUTPUT/{name}.json"'
    return Part(name, limit, command, EXTENSION, alone=True)


def _cluster(name: str, limit: float, words: str) -> Part:
    """On NCCL hosts that share the GPU."""
    return _bench(name, limit, f'{words} --device cuda --logs "$OUTPUT/logs/{name}"')


_ATTACHED = "attached+start_powerSGD_iter=2+bucket_cap_mb"
_INT8 = "int8-wire+start_powerSGD_iter=2+bucket_cap_mb"
_TIMELINE = f"bench_timeline.py --steps 8 --methods none {_ATTACHED}=100:4 {_INT8}=100:16"
_STEPS = (
    "bench_cluster.py --models gpt2 resnet50 --rounds 8 --steps 4"
    f" --methods none {_ATTACHED}=100:4 {_ATTACHED}=50:4 {_INT8}=100:16"
)
_GPT2 = "bench_cluster.py --models gpt2"
_LOCAL_STEPS = (
    f"{_GPT2} --rounds 3 --steps 10 --methods none local-sgd+warmup_steps=2:16"
    " diloco+warmup_steps=2+fragment_sync_delay=1:16"
)
_LOSS = f"{_GPT2} --rounds 0 --ranks 2 --learning-steps 300 --methods plain int8-wire:16"
_LEVELS = f"{_INT8}=100:16 {_INT8}=100+levels=1:16"  # of hosts of four, as two and as one
_KERNELS = (
    f"{_PROGRAM}/bench_kernels --models gpt2 gpt2x4 gpt2x4+1 llama llama+1 --ranks 4 16 32"
    ' --kinds float32 bfloat16/bfloat16 --products bfloat16 --json "$OUTPUT/kernels-record.json"'
)
_STAGES = "bench_stages.py --device cuda --models"


def first_call() -> list[Part]:
    return [
        *_checks(),
        Part("kernels", 40, _SHARDS.replace("PROGRAM", _PROGRAM), PROGRAMS),
        _tests("smoke", 60, "tests/python/training/test_smoke.py -k cuda"),
        _tests("test-nccl", 60, "tests/python/backend/test_cuda_nccl.py --maxfail=2"),
        _tests("test-cuda", 170, f"{_OTHER_TESTS} --maxfail=6"),
        _tests("test-torchft", 60, "tests/python/fault_tolerance/test_cuda_deaths.py"),
        _cluster("timeline", 60, _TIMELINE),
        _cluster("cluster-steps", 120, _STEPS),
        _cluster("loss", 130, _LOSS),
        _cluster("local-steps", 50, _LOCAL_STEPS),
    ]


def second_call(verdicts: Mapping[str, str]) -> list[Part]:
    """First what was not well in the first call, then records."""
    return [
        *(part for part in first_call() if verdicts.get(part.name) != OK),
        Part("kernels-record", 60, _KERNELS, PROGRAMS, alone=True),
        _bench("stages", 60, f"{_STAGES} gpt2 llama resnet50 --ranks 4 16 32"),
        _bench("steps", 50, "bench_step.py"),
        _cluster("levels", 60, f"{_GPT2} --ranks 8 --per-host 4 --rounds 3 --methods {_LEVELS}"),
        _bench("stages-high-ranks", 30, f"{_STAGES} gpt2 --ranks 64 128 --repeats 5"),
    ]
