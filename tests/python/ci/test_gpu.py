# SPDX-License-Identifier: BSD-3-Clause
""".ci/gpu runs from end to end on stand-ins for a GPU, a compiler and Python.

The command lines that they are given are then read by the programs that they stand for.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import bench_cluster
import bench_model
import bench_stages
import bench_step
import pytest
from gpu_stand_ins import Ending, Machine, make_machine

from support.deadline import DEADLOCK
from support.repository import ROOT

BUILDS = {"build-programs", "build-extension"}
FIRST = [
    *("kernels", "kernels-float32", "kernels-products", "kernels-serial", "kernels-bfloat16"),
    *("smoke", "test-nccl", "test-cuda", "bench-stages", "memcheck"),
]
CLUSTERS = ["bench-cluster-gpt2", "bench-cluster-resnet50"]
SECOND = ["bench-step", *CLUSTERS, "ncu", "bench-model", "racecheck"]
OF_EXTENSION = ["smoke", "test-nccl", "test-cuda", "bench-stages"]
SMOKE = "tests/python/training/test_smoke.py::test_two_ranks_agree[cuda-auto]"
NCCL = "tests/python/backend/test_cuda_nccl.py::test_it[a b]"
UNTIL_THE_KERNELS_ARE_MEASURED = """
until [[ $(<"$STAND_INS/calls") == *kernels_bfloat16* ]]; do sleep 0.1; done
"""

FIGURES: dict[str, Any] = {
    "bench_kernels": {"results": [{"model": "gpt2", "kind": "float32", "rank": 4, "ratio": 1.25}]},
    "bench_stages": {
        "results": [{"model": "gpt2", "rank": 4, "hook_over_ours": 15.5, "ours_over_floor": 1.75}]
    },
    "bench_step": {"results": [{"rank": 4, "bucket_cap_mb": 25, "ms": 31.25}]},
    "bench_cluster": {
        "settings": [{"model": "gpt2", "methods": {"none": {"step_ms": 37.5}, "plain": {}}}]
    },
    "bench_model": {
        "stages": [{"rank": 4, "residual_dtype": "float32", "share": {"1": 0.0325}}],
    },
}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return make_machine(tmp_path)


def _contents(archive: Path) -> dict[str, str]:
    """The files of the archive, all of which are read."""
    with tarfile.open(archive) as opened:
        files = ((member.name, opened.extractfile(member)) for member in opened)
        return {name.split("/", 1)[1]: file.read().decode() for name, file in files if file}


def test_two_calls_in_which_all_is_well(machine: Machine) -> None:
    for name, figures in FIGURES.items():
        (machine.stand_ins / "json" / name).write_text(json.dumps(figures))
    machine.programs()
    machine.behaves("setup", UNTIL_THE_KERNELS_ARE_MEASURED)
    first = machine.call(POWERSGD_COMMIT="abc1234")
    assert first.status == 0, first.output
    assert [name for name in first.verdicts if name not in BUILDS] == FIRST
    assert set(first.verdicts.values()) == {"ok"}
    built = [machine.calls("nvcc"), machine.calls("setup")]
    second = machine.call("second", POWERSGD_COMMIT="abc1234")
    assert second.status == 0, second.output
    assert sorted(second.verdicts) == sorted([*BUILDS, *SECOND])
    assert set(second.verdicts.values()) == {"ok"}
    assert [machine.calls("nvcc"), machine.calls("setup")] == built  # the sources are the same
    _check_results(second)
    _check_command_lines(machine)


def _check_results(ended: Ending) -> None:
    assert sorted(os.listdir(ended.results)) == ["results.tar.gz", "summary.txt"]
    assert len(ended.summary) <= 40
    summary = " ".join(" ".join(ended.summary).split())  # without the breaks of lines
    assert summary.startswith("second call, commit abc1234, ")
    for part in [*FIRST, *SECOND]:
        assert re.search(rf"\b{part} \d+ s", summary), part
    assert "test_smoke::test_two_ranks_agree[cuda-auto] passed" in summary
    for figure in ("1.25", "15.50", "1.75", "31.25", "37.50", "3.25"):
        assert figure in summary
    files = _contents(ended.results / "results.tar.gz")
    assert "[       OK ] All/Step.A" in files["logs/kernels/All_Step.txt"]
    assert "output of bench_stages" in files["logs/bench-stages.txt"]
    assert json.loads(files["bench_step_serial.json"]) == FIGURES["bench_step"]
    assert len([name for name in files if name.endswith(".json")]) == 11
    assert "numpy" in files["machine.txt"]


def _check_command_lines(machine: Machine) -> None:
    """The programs that the stand-ins stand for understand what these were given."""
    assert {call["commit"] for call in machine.calls("bench_kernels")} == {"abc1234"}
    assert [call["dependent_launch"] for call in machine.calls("bench_step")] == ["", "0"]
    (setup,) = machine.calls("setup")
    assert setup["build_cuda"] == "1"
    assert setup["home"] == str(machine.stand_ins / "toolkit")  # not that of the nvcc on PATH
    for program in (bench_stages, bench_step, bench_model):
        for call in machine.calls(program.__name__):
            assert program.parse_arguments(call["words"].split()[1:]).device == "cuda"
    for call in machine.calls("bench_cluster"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", call["words"].split())
            assert bench_cluster.parse_arguments().rates == ["10gbit"]
    cases = (ROOT / "benchmarks/kernels/cases.h").read_text()
    for call in machine.calls("bench_kernels"):
        names = call["words"].split(" --json")[0].removeprefix("--help").split()
        assert all(f'"{name}"' in cases for name in names if not name.isdigit()), names
    for call in machine.calls("ncu"):
        (kernel,) = re.findall(r"regex:\^(\w+)", call["words"])
        source = ROOT / f"csrc/kernels/cuda/{kernel}.cu"
        assert re.search(rf"^__global__[^{{]* {kernel}_kernel\(", source.read_text(), re.MULTILINE)
    every = {str(f.relative_to(ROOT)) for f in ROOT.glob("tests/python/*/test_cuda*.py")}
    run = [call["words"] for name in ("nccl", "pytest") for call in machine.calls(name)]
    assert set(re.findall(r"\S+\.py", " ".join(run))) == every
    file, name = SMOKE.split("::")
    assert f"def {name.split('[')[0]}(" in (ROOT / file).read_text()


def test_what_hangs_crashes_or_is_missing_costs_that_part_only(machine: Machine) -> None:
    # It heeds no interrupt, and leaves a child behind that keeps its output open.
    hangs = "[[ $* != *Step* ]] || { trap '' INT; sleep 60 & sleep 60; }\n"
    machine.behaves("kernels_cuda", hangs + "[[ $* != *Project.[*]* ]] || kill -SEGV $$")
    machine.behaves("nccl", "echo ' FAILED [100%]'; exit 1")
    machine.lacks("compute-sanitizer")
    first = machine.call("--longest", "3")
    assert first.verdicts.pop("kernels") == (
        "2 of 2: All_Project CRASHED with SIGSEGV; All_Step TIME LIMIT of 3 s"
    ), first.output
    assert first.verdicts.pop("test-nccl") == "FAILED with 1"
    assert first.verdicts.pop("memcheck") == "NOT RUN: there is no compute-sanitizer"
    assert set(first.verdicts.values()) == {"ok"}
    assert first.status == 1
    failed = ["FAILED test_cuda_nccl::test_it[a b]", "NO END All/Project.A", "NO END All/Step.A"]
    assert set(failed) <= set(first.summary)

    for program in ("kernels_cuda", "nccl"):
        machine.behaves(program, "true")
    second = machine.call("second", "--parts", "kernels-again", "tests-again", "memcheck-failed")
    assert second.verdicts.pop("memcheck-failed") == "NOT RUN: there is no compute-sanitizer"
    assert set(second.verdicts.values()) == {"ok"}
    kernels, tests = machine.calls("kernels_cuda")[-1], machine.calls("nccl")[-1]
    assert kernels["words"] == "--gtest_filter=All/Project.A:All/Step.A"
    assert tests["words"].endswith(NCCL)
    assert kernels["dependent_launch"] == tests["dependent_launch"] == "0"
    assert len(second.summary) <= 40


def test_without_nccl_the_reason_comes_first_and_then_the_stages(machine: Machine) -> None:
    machine.programs()
    machine.behaves("setup", UNTIL_THE_KERNELS_ARE_MEASURED)
    machine.behaves("smoke", "echo ' FAILED [100%]'; exit 1")
    machine.behaves("pytest", "echo ' SKIPPED (no GPU)'; exit")
    first = machine.call()
    assert first.verdicts["test-cuda"] == "FAILED: every test was skipped"
    order = [part for part in first.verdicts if part not in BUILDS]
    after = order[order.index("smoke") + 1 :]
    assert after == ["smoke-again", "bench-stages", "test-nccl", "test-cuda", "memcheck"]
    again = [call for call in machine.calls("smoke") if call["words"].endswith(SMOKE)]
    assert sorted(call["dependent_launch"] for call in again) == ["", "", "0"]
    assert "FAILED test_smoke::test_two_ranks_agree[cuda-auto]" in first.summary


def test_a_build_that_fails_costs_what_needs_it(machine: Machine) -> None:
    machine.behaves("setup", "echo error: no CUDA >&2; exit 1")
    ended = machine.call()
    for part in FIRST:
        expected = "NOT RUN: build-extension: FAILED with 1" if part in OF_EXTENSION else "ok"
        assert ended.verdicts[part] == expected, ended.output
    assert "error: no CUDA" in ended.output
    assert ended.status == 1


def test_timed_launches_from_python_wait_for_both_builds(machine: Machine) -> None:
    machine.behaves("nvcc", "[[ $* != *-c* ]] || sleep 0.1")
    order = list(machine.call("--parts", "bench-stages", "smoke", "kernels").verdicts)
    assert order.index("build-programs") < order.index("bench-stages")


def test_what_had_no_time_is_in_the_second_call(machine: Machine) -> None:
    machine.behaves("bench_kernels", "[[ $* == *--help* ]] || sleep 60")
    ended = machine.call("--seconds", "11", "--parts", "kernels-float32", "memcheck")
    assert ended.verdicts["kernels-float32"].startswith("NO TIME LEFT after")
    assert ended.verdicts["memcheck"] == "NO TIME LEFT"
    machine.behaves("bench_kernels", "true")
    again = machine.call("second", "--parts", "kernels-float32", "memcheck")
    assert again.verdicts["kernels-float32"] == again.verdicts["memcheck"] == "ok"


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGKILL])
def test_a_call_that_is_killed_leaves_results(machine: Machine, kind: signal.Signals) -> None:
    machine.behaves("bench_kernels", "[[ $* == *--help* ]] || sleep 60")
    with machine.start("gpu", "--parts", "kernels", "kernels-float32") as process:
        while process.poll() is None and not machine.calls("bench_kernels"):
            time.sleep(0.05)
        process.send_signal(kind)
        process.wait(DEADLOCK)
    files = _contents(machine.root / "results" / "results.tar.gz")
    assert "OK" in files["logs/kernels/All_Project.txt"]
    assert "kernels" in (machine.root / "results" / "summary.txt").read_text()


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
    assert machine.call("--parts", "kernels").summary[0].startswith("first call, commit abc1234")
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
