# SPDX-License-Identifier: BSD-3-Clause
""".ci/gpu runs from end to end on stand-ins for a GPU, a compiler and Python.

The stand-ins do nothing but end as a test wants it. The command lines that they are given are then
read by the programs that they stand for.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import bench_model
import bench_stages
import pytest

from support.repository import ROOT

BUILDS = ["build-bench", "torch", "build-extension", "build-kernels"]
PARTS = [
    *("bench-kernels", "bench-kernels-serial", "kernels", "test-nccl", "test-cuda"),
    *("bench-stages", "tensor-cores-on", "tensor-cores-off", "memcheck", "racecheck"),
    "bench-model",
]
OF_EXTENSION = ["test-nccl", "test-cuda", "bench-stages", "bench-model"]
OF_KERNELS = ["kernels", "memcheck", "racecheck"]

# It notes what it was given in $STAND_INS/calls, writes JSON where a benchmark would, makes what a
# compiler would, and ends as the file of its name in $STAND_INS/behaves says.
STAND_IN = r"""#!/bin/bash
name=${0##*/}
case "$name $*" in
  "python3 setup.py"*) name=setup ;;
  "python3 -m pytest"*nccl*) name=nccl ;;
  "python3 -m pytest"*) name=pytest ;;
  "python3 benchmarks/"*) name=$(basename "$1" .py) ;;
  "python3 -c import torch"*) name=torch ;;
esac
variables="$POWERSGD_COMMIT|$POWERSGD_DEPENDENT_LAUNCH|$POWERSGD_TENSOR_CORES"
echo "$name|$variables|$POWERSGD_BUILD_CUDA|$CUDA_HOME|$*" >>"$STAND_INS/calls"
previous=
for word; do
  case "$name $previous" in
    *" --json") echo '{"results": []}' >"$word" ;;
    "nvcc -o") [[ $word != *bench_kernels ]] || cp "$0" "$word" ;;
    "cmake --build") mkdir -p "$word" && cp "$0" "$word/kernels_cuda" ;;
    *compute_cap*) echo 9.0 ;;
  esac
  previous=$word
done
[[ $name != nvcc || $* != *--dryrun* ]] || echo "#\$ _HERE_=$STAND_INS/toolkit/bin" >&2
echo "output of $name"
[[ ! -x $STAND_INS/behaves/$name ]] || . "$STAND_INS/behaves/$name"
"""
PROGRAMS = ["nvidia-smi", "python3", "nvcc", "cmake", "ninja", "compute-sanitizer"]
TOOLS = (
    "basename bash cat cp cut date dirname env find grep head kill ls mkdir mktemp mv nice nproc"
    " printf rm sed sh sleep sort tail tee timeout tr true wc xargs"
)


@dataclass
class Machine:
    """A copy of the scripts, and a PATH that has the stand-ins and a few tools, but no git."""

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

    def run(self, **variables: str) -> Ending:
        results = self.root / "results"
        environment = {**self.environment, "RESULTS": str(results), "JOBS": "2", **variables}
        ended = subprocess.run(
            [self.root / ".ci" / "gpu"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        summary = (results / "summary.txt").read_text() if results.exists() else ""
        lines = re.findall(r"^(\S+) +\d+ s  (.*)$", summary, re.MULTILINE)
        return Ending(ended.returncode, ended.stdout + ended.stderr, dict(lines), results)

    def calls(self, program: str) -> list[dict[str, str]]:
        names = ("name", "commit", "dependent", "tensor_cores", "build_cuda", "home", "words")
        lines = (self.stand_ins / "calls").read_text().splitlines()
        calls = [dict(zip(names, line.split("|", 6), strict=True)) for line in lines]
        return [call for call in calls if call["name"] == program]


@dataclass
class Ending:
    status: int
    output: str
    verdicts: dict[str, str]
    results: Path


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    root, stand_ins = tmp_path / "tree", tmp_path / "stand_ins"
    (root / ".ci").mkdir(parents=True)
    for file in (ROOT / ".ci").iterdir():
        if file.is_file():
            shutil.copy(file, root / ".ci" / file.name)
    for folder in ("benchmarks", "csrc/kernels/cuda", "include", "tests/python/backend"):
        (root / folder).mkdir(parents=True)
    for file in [*ROOT.glob("csrc/kernels/cuda/*.c*"), *ROOT.glob("tests/python/*/test_cuda*.py")]:
        copy = root / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.touch()
    (root / "benchmarks" / "bench_kernels.cu").touch()
    (stand_ins / "behaves").mkdir(parents=True)
    (stand_ins / "bin").mkdir()
    (stand_ins / "toolkit" / "bin").mkdir(parents=True)
    for path in [*(stand_ins / "bin" / name for name in PROGRAMS), stand_ins / "toolkit/bin/nvcc"]:
        path.write_text(STAND_IN)
        path.chmod(0o755)
    for name in TOOLS.split():
        found = shutil.which(name)
        assert found, name
        (stand_ins / "bin" / name).symlink_to(found)
    environment = {"PATH": str(stand_ins / "bin"), "STAND_INS": str(stand_ins), "HOME": "/"}
    return Machine(root, stand_ins, environment)


def test_every_part_runs_and_its_results_arrive(machine: Machine) -> None:
    ended = machine.run(POWERSGD_COMMIT="abc1234")
    assert ended.verdicts == dict.fromkeys([*BUILDS, *PARTS], "ok"), ended.output
    assert ended.status == 0
    assert [name for name in ended.verdicts if name in PARTS] == PARTS  # the most valuable first
    logs = {file.name: file.read_text() for file in (ended.results / "logs").iterdir()}
    assert sorted(logs) == sorted([*BUILDS, *PARTS])
    assert "output of nccl" in logs["test-nccl"]
    assert "output of bench_stages" in ended.output
    assert {file.name for file in ended.results.glob("*.json")} == {
        *(f"kernels_cuda{suffix}.json" for suffix in ("", "_serial")),
        *(f"kernels_cuda_tensor_cores_{state}.json" for state in ("on", "off")),
        *("stages_cuda.json", "model_cuda.json"),
    }
    kernels = machine.calls("bench_kernels")
    switches = [(call["dependent"], call["tensor_cores"]) for call in kernels]
    assert switches == [("", ""), ("0", ""), ("", "1"), ("", "0")]
    (setup,) = machine.calls("setup")
    assert setup["build_cuda"] == "1"
    assert setup["home"] == str(machine.stand_ins / "toolkit")  # not that of the nvcc on PATH
    assert {call["commit"] for call in kernels} == {"abc1234"}


def test_no_build_runs_beside_what_launches_bound(machine: Machine) -> None:
    machine.behaves("cmake", "[[ $* != *--build* ]] || sleep 2")
    ended = machine.run(PARTS="bench-stages memcheck")
    expected = ["torch", "build-extension", "build-kernels", "bench-stages", "memcheck"]
    assert sorted(expected) == sorted(ended.verdicts)
    order = list(ended.verdicts)
    assert order.index("build-kernels") < order.index("bench-stages")
    assert ended.status == 0, ended.output


def test_the_programs_understand_their_command_lines(machine: Machine) -> None:
    machine.run(PARTS="bench-stages bench-model test-nccl test-cuda")
    (stages,), (model,) = machine.calls("bench_stages"), machine.calls("bench_model")
    arguments = bench_stages.parse_arguments(stages["words"].split()[1:])
    assert arguments.device == "cuda"
    assert not arguments.profile  # a profiler stays loaded and slows every launch
    assert bench_model.parse_arguments(model["words"].split()[1:]).device == "cuda"
    tests = [set(re.findall(r"\S+\.py", call["words"])) for call in machine.calls("pytest")]
    nccl = [set(re.findall(r"\S+\.py", call["words"])) for call in machine.calls("nccl")]
    every = {str(f.relative_to(ROOT)) for f in ROOT.glob("tests/python/*/test_cuda*.py")}
    assert nccl == [{"tests/python/backend/test_cuda_nccl.py"}]
    assert tests == [every - nccl[0]]


def test_a_part_that_hangs_costs_that_part_only(machine: Machine) -> None:
    # It heeds no interrupt, and leaves a child behind that keeps its output open.
    machine.behaves("kernels_cuda", "trap '' INT TERM; sleep 60 & sleep 60")
    ended = machine.run(PARTS="bench-kernels kernels test-nccl", PART_SECONDS="2")
    assert ended.verdicts.pop("kernels") == "TIME LIMIT of 2 s", ended.output
    assert set(ended.verdicts.values()) == {"ok"}
    assert "output of kernels_cuda" in (ended.results / "logs" / "kernels").read_text()
    assert ended.status == 1


def test_a_part_that_crashes_costs_that_part_only(machine: Machine) -> None:
    machine.behaves("bench_kernels", "kill -SEGV $$")
    machine.behaves("nccl", "echo 3 failed; exit 1")
    ended = machine.run(PARTS="bench-kernels kernels test-nccl test-cuda")
    assert ended.verdicts.pop("bench-kernels") == "FAILED with 139", ended.output
    assert ended.verdicts.pop("test-nccl") == "FAILED with 1"
    assert set(ended.verdicts.values()) == {"ok"}
    assert "3 failed" in ended.output
    assert ended.status == 1


def test_a_build_that_fails_costs_what_needs_it(machine: Machine) -> None:
    machine.behaves("setup", "echo error: no CUDA >&2; exit 1")
    ended = machine.run()
    assert ended.verdicts["build-extension"] == "FAILED with 1"
    for part in PARTS:
        expected = "NOT RUN: build-extension: FAILED with 1" if part in OF_EXTENSION else "ok"
        assert ended.verdicts[part] == expected, ended.output
    assert "error: no CUDA" in ended.output
    assert ended.status == 1


def test_what_the_machine_lacks_is_named(machine: Machine) -> None:
    machine.behaves("cmake", "echo CMake Error: GoogleTest is not installed, and nothing; exit 1")
    ended = machine.run()
    why = "GoogleTest is not installed (libgtest-dev)"
    assert ended.verdicts["build-kernels"] == f"NOT RUN: {why}", ended.output
    for part in PARTS:
        expected = f"NOT RUN: build-kernels: {why}" if part in OF_KERNELS else "ok"
        assert ended.verdicts[part] == expected
    assert ended.status == 0


def test_without_a_torch_that_finds_the_gpu_the_kernels_are_measured(machine: Machine) -> None:
    machine.behaves("torch", "echo AssertionError: it finds no GPU; exit 1")
    ended = machine.run()
    for part in PARTS:
        because = "NOT RUN: build-extension: torch: FAILED with 1"
        assert ended.verdicts[part] == (because if part in OF_EXTENSION else "ok"), ended.output
    assert "AssertionError: it finds no GPU" in ended.output
    assert ended.status == 1


@pytest.mark.parametrize("program", ["ninja", "compute-sanitizer", "cmake"])
def test_a_program_that_is_missing_fails_nothing(machine: Machine, program: str) -> None:
    machine.lacks(program)
    ended = machine.run(PARTS="bench-kernels kernels memcheck")
    assert ended.verdicts["bench-kernels"] == "ok"
    assert ended.status == 0, ended.output
    expected = {
        "ninja": "ok",
        "compute-sanitizer": "NOT RUN: there is no compute-sanitizer",
        "cmake": "NOT RUN: build-kernels: there is no cmake",
    }
    assert ended.verdicts["memcheck"] == expected[program]


def test_the_parts_without_time_are_named(machine: Machine) -> None:
    machine.behaves("bench_kernels", "sleep 60")
    ended = machine.run(PARTS="bench-kernels kernels racecheck", SECONDS_IN_ALL="9")
    assert ended.verdicts["bench-kernels"].startswith("TIME LIMIT")
    assert ended.verdicts["kernels"] == ended.verdicts["racecheck"] == "NO TIME LEFT"
    assert 'without time; to run them: PARTS="kernels racecheck" .ci/gpu' in ended.output
    assert ended.status == 1


def test_without_a_gpu_it_stops_at_once(machine: Machine) -> None:
    machine.lacks("nvidia-smi")
    ended = machine.run()
    assert ended.status == 1
    assert "nvidia-smi finds no GPU" in ended.output
    assert ended.verdicts == {}


def test_an_unknown_part_is_refused(machine: Machine) -> None:
    ended = machine.run(PARTS="kernels bench")
    assert ended.status == 2
    assert f"PARTS names bench; the parts are: {' '.join(PARTS)}" in ended.output


def test_results_are_json_at_any_time(tmp_path: Path) -> None:
    from provenance import write

    file = tmp_path / "new" / "results.json"
    for count in range(3):
        write({"results": [0] * count}, file)
        assert json.loads(file.read_text()) == {"results": [0] * count}
        assert os.listdir(file.parent) == ["results.json"]
    write({}, None)


def test_the_commit_needs_no_git(monkeypatch: pytest.MonkeyPatch) -> None:
    from provenance import commit

    monkeypatch.delenv("POWERSGD_COMMIT", raising=False)
    monkeypatch.setenv("PATH", "")
    assert commit() == ""
    monkeypatch.setenv("POWERSGD_COMMIT", "abc1234")
    assert commit() == "abc1234"
