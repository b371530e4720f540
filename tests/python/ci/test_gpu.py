# SPDX-License-Identifier: BSD-3-Clause
""".ci/gpu runs from end to end on stand-ins for a GPU, a compiler and Python.

The command lines that they are given are then read by the programs that they stand for.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import tarfile
import time
from pathlib import Path

import bench_cluster
import bench_stages
import bench_step
import bench_timeline
import pytest
from gpu_stand_ins import Ending, Machine, make_machine

from support.deadline import DEADLOCK
from support.repository import ROOT

EXTENSION, PROGRAMS = "build-extension", "build-programs"
BESIDE = ["ptx-80", "ptx-75", "racecheck", "synccheck", "memcheck"]
TIMED = ["timeline", "cluster-steps", "loss", "local-steps"]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return make_machine(tmp_path)


def _contents(archive: Path) -> dict[str, str]:
    """The files of the archive, all of which are read."""
    with tarfile.open(archive) as opened:
        files = ((member.name, opened.extractfile(member)) for member in opened)
        return {name.split("/", 1)[1]: file.read().decode() for name, file in files if file}


def test_two_calls_in_which_all_is_well(machine: Machine) -> None:
    first = machine.call(POWERSGD_COMMIT="abc1234")
    assert first.status == 0, first.output
    assert {EXTENSION, PROGRAMS, *BESIDE, "smoke", "kernels"} <= first.verdicts.keys()
    order = list(first.verdicts)
    for name in TIMED:  # nothing runs beside what is timed
        assert order.index(name) > max(map(order.index, [EXTENSION, *BESIDE])), order
    compiled = machine.calls("nvcc")
    second = machine.call("second", "--prebuilt", POWERSGD_COMMIT="abc1234")
    assert second.status == 0, second.output
    assert {*first.verdicts.values(), *second.verdicts.values()} == {"ok"}
    assert not first.verdicts.keys() - {EXTENSION, PROGRAMS} & second.verdicts.keys()
    assert machine.calls("nvcc") == compiled  # the sources are the same
    assert len(machine.calls("setup")) == 1
    _check_results(first)
    _check_command_lines(machine)


def _check_results(first: Ending) -> None:
    assert sorted(os.listdir(first.results)) == ["results.tar.gz", "summary.txt"]
    assert first.summary[0].startswith("first call, commit abc1234, ")
    assert [line.split()[1] for line in first.summary[1:]] == list(first.verdicts)
    files = _contents(first.results / "results.tar.gz")
    assert "output of bench_timeline" in files["logs/timeline.txt"]
    assert "timeline.json" in files


def _check_command_lines(machine: Machine) -> None:
    """The programs that the stand-ins stand for understand what these were given."""
    (setup,) = machine.calls("setup")
    assert setup["build_cuda"] == "1"
    assert setup["home"] == str(machine.stand_ins / "toolkit")  # not that of the nvcc on PATH
    for program in (bench_cluster, bench_stages, bench_step, bench_timeline):
        for call in machine.calls(program.__name__):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(sys, "argv", call["words"].split())
                assert program.parse_arguments().device == "cuda"
    cases = (ROOT / "benchmarks/kernels/cases.h").read_text()
    for call in machine.calls("bench_kernels"):
        names = call["words"].split(" --json")[0].removeprefix("--help").split()
        assert all(f'"{name}"' in cases for name in names if not name.isdigit()), names
    every = {str(f.relative_to(ROOT)) for f in ROOT.glob("tests/python/*/test_cuda*.py")}
    run = [call["words"] for name in ("nccl", "pytest") for call in machine.calls(name)]
    assert set(re.findall(r"\S+\.py", " ".join(run))) == every
    tools = machine.calls("compute-sanitizer")
    (checked,) = {call["words"].partition("--gtest_filter=")[2] for call in tools}
    sources = "".join(f.read_text() for f in (ROOT / "tests/cpp/kernels").rglob("*.cpp"))
    for suite, test in re.findall(r"All/(\w+)\.(\w+)/", checked):
        assert f"TEST_P({suite}, {test})" in sources
    shapes = {tuple(map(int, s)) for s in re.findall(r"_(\d+)x(\d+)r(\d+)", checked)}
    assert all("{" + ", ".join(map(str, shape)) + "}" in sources for shape in shapes)


def test_what_crashes_or_fails_is_repeated_in_the_second_call(machine: Machine) -> None:
    machine.behaves("kernels_cuda", "kill -SEGV $$")
    machine.behaves("nccl", "exit 1")
    machine.behaves("pytest", "echo '= 2 skipped in 0.1s ='; exit")
    first = machine.call("--parts", "smoke", "kernels", "test-nccl", "test-cuda")
    assert first.status == 1
    assert first.verdicts == {
        **dict.fromkeys((EXTENSION, PROGRAMS, "smoke"), "ok"),
        "kernels": "CRASHED with SIGSEGV",
        "test-nccl": "FAILED with 1",
        "test-cuda": "FAILED: every test was skipped",
    }, first.output
    for program in ("kernels_cuda", "nccl"):
        machine.behaves(program, "true")
    second = machine.call("second", "--parts", "kernels", "test-nccl")
    assert set(second.verdicts.values()) == {"ok"}
    assert " --last-failed " in machine.calls("nccl")[-1]["words"]
    assert "no part smoke in this call" in machine.call("second", "--parts", "smoke").output


def test_what_hangs_ends_with_its_time_and_runs_in_the_second_call(machine: Machine) -> None:
    # It heeds no interrupt, and leaves a child behind that keeps its output open.
    machine.behaves("smoke", "trap '' INT; sleep 60 & sleep 60")
    ended = machine.call("--parts", "smoke", "test-nccl", "--seconds", "12")
    assert ended.verdicts["smoke"] == ended.verdicts["test-nccl"] == "NO TIME LEFT"
    machine.behaves("smoke", "true")
    again = machine.call("second", "--parts", "smoke", "test-nccl")
    assert set(again.verdicts.values()) == {"ok"}


def test_a_build_that_fails_or_a_missing_tool_costs_what_needs_it(machine: Machine) -> None:
    machine.behaves("setup", "echo error: no CUDA >&2; exit 1")
    machine.lacks("compute-sanitizer")
    ended = machine.call()
    assert ended.status == 1
    assert ended.verdicts["smoke"] == "NOT RUN: build-extension: FAILED with 1", ended.output
    assert ended.verdicts["kernels"] == ended.verdicts["ptx-80"] == "ok"
    assert re.fullmatch("NOT RUN: .*compute-sanitizer.* not found", ended.verdicts["racecheck"])
    assert "error: no CUDA" in ended.output


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGKILL])
def test_a_call_that_is_killed_leaves_results(machine: Machine, kind: signal.Signals) -> None:
    machine.behaves("smoke", "sleep 60")
    with machine.start("gpu", "--parts", "kernels", "smoke") as process:
        summary = machine.root / "results" / "summary.txt"
        while not (summary.exists() and "kernels" in summary.read_text()):
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(kind)
        process.wait(DEADLOCK)
    files = _contents(machine.root / "results" / "results.tar.gz")
    assert "output of kernels_cuda" in files["logs/kernels.txt"]


def test_without_a_gpu_or_with_an_unknown_part_it_stops_at_once(machine: Machine) -> None:
    ended = machine.call("--parts", "kernels", "bench")
    assert "no part bench in this call" in ended.output
    machine.lacks("nvidia-smi")
    assert "nvidia-smi finds no GPU" in machine.call().output


def test_programs_from_elsewhere_are_used_if_they_fit(machine: Machine) -> None:
    assert "built build/gpu-programs: sm_90" in machine.programs(POWERSGD_COMMIT="abc1234")
    compiled = machine.calls("nvcc")
    assert "up to date: sm_90, commit abc1234" in machine.programs()
    assert machine.calls("nvcc") == compiled
    assert "is for sm_90, and this needs sm_80" in machine.programs(ARCHITECTURE="80")
    (machine.root / "csrc/kernels/cuda/project.cu").write_text("// changed\n")
    assert "is stale" in machine.programs(ARCHITECTURE="80")
    program = machine.root / "build/gpu-programs/bench_kernels"
    program.write_text("#!/no/such/interpreter\n")
    machine.lacks("nvcc")
    shutil.rmtree(machine.stand_ins / "toolkit")
    if not Path("/usr/local/cuda/bin/nvcc").exists():
        last = machine.programs(ARCHITECTURE="80")
        assert last.startswith("build/gpu-programs does not run here; there is no nvcc")
        ended = machine.call("--parts", "kernels")
        assert ended.verdicts["kernels"].startswith("NOT RUN")
        assert ended.status == 0, ended.output
