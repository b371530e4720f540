# SPDX-License-Identifier: BSD-3-Clause
"""The advise command on two ranks: what it says, its errors, and how its processes end."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from support import command_line, launch, ranks
from torch_powersgd.cli import advise

MODULE = """
import os
import torch

from torch_powersgd.cli import rehearsal, verdict

rehearsal.ROUNDS = (2, 2)
verdict.WAITS = 0

def model():
    return torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.Linear(200, 300))

def two_buckets_that_pay():
    verdict.LEAST_GAIN, verdict._always_faster = 0, lambda plain, setting: True
    return torch.nn.Sequential(torch.nn.Linear(600, 600), torch.nn.Linear(600, 600))

def step(model):
    model(torch.randn(8, 300)).square().mean().backward()

def missing_on_rank_0():
    if os.environ["RANK"] == "0":
        raise FileNotFoundError("the weights")
    return model()

def exits_on_rank_1(model):
    if os.environ["RANK"] == "1":
        raise SystemExit(0)
    step(model)

calls = []

def breaks_rank_0(model):
    calls.append(1)
    if len(calls) > 10 and os.environ["RANK"] == "0":
        raise MemoryError("in the middle of a measurement")
    step(model)

def without_arguments():
    pass
"""
MODEL = "models_of_advise:model"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "models_of_advise.py").write_text(MODULE)
    return tmp_path


def _run_rank(
    rank: int, folder: Path, port: int, arguments: list[str], hosts: list[str] | None = None
) -> tuple[object, str]:
    launch.enter(rank, len(hosts or [0, 1]), port)
    if hosts:
        os.environ["POWERSGD_HOST"] = hosts[rank]
    sys.path.insert(0, str(folder))
    os.environ["TORCHELASTIC_ERROR_FILE"] = str(folder / f"error_{rank}.json")
    return command_line.run("advise", *arguments)


def _two(folder: Path, *arguments: str) -> list[ranks.Outcome]:
    return ranks.outcomes(2, _run_rank, folder, launch.free_port(), list(arguments), backend=None)


def test_one_process_says_what_was_measured(folder: Path) -> None:
    first, second = _two(folder, MODEL, "--backward-ms", "2", "--ranks", "4")
    status, said = first.value
    assert status == 0
    words = " ".join(said.split())
    assert "The step is a stand-in, whose backward pass takes 2 ms." in words
    assert second.value == (0, "")


def test_both_sums_are_measured_where_processes_share_a_link(folder: Path) -> None:
    arguments = [MODEL, "--backward-ms", "2", "--ranks", "4"]
    given = folder, launch.free_port(), arguments, ["a", "a", "b", "b"]
    first, *others = ranks.run(4, _run_rank, *given, backend=None)
    status, said = first
    assert status == 0
    assert "\n4 processes (2 hosts of 2 processes), " in said
    table = said.partition("no averaging ")[2]
    assert "\nmatrix rank 4, int8 " in table
    assert "\nmatrix rank 4, float32 " in table
    assert others == [(0, "")] * 3


@pytest.mark.parametrize(
    ("hosts", "wires"),
    [
        ([0, 1], ["int8"]),
        ([0, 0, 0], ["int8"]),
        ([0, 0, 1, 1], ["int8", "none"]),
        ([0, 0, 1], ["int8", "none"]),
    ],
)
def test_the_wires_by_default(hosts: list[int], wires: list[str]) -> None:
    assert advise.wires_on(hosts) == wires


def test_what_pays_is_in_the_lines_to_copy(folder: Path) -> None:
    """Another size of buckets here, and local steps."""
    model = "models_of_advise:two_buckets_that_pay"
    first, second = _two(folder, model, "--backward-ms", "2", "--ranks", "4")
    status, said = first.value
    assert status == 0
    assert "With bucket_cap_mb=5 a step takes" in said
    assert "\nddp = DistributedDataParallel(model, bucket_cap_mb=5)\ntorch_powersgd.attach(" in said
    words = " ".join(said.split())
    assert "torch_powersgd.LocalSGD(ddp, optimizer, ...) hides the wait" in words
    assert "\nsync_every=" in said
    assert ", density=1/16 " in said
    assert second.value == (0, "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["models_of_advise:missing_on_rank_0"],
            "error: rank 0: models_of_advise:missing_on_rank_0 failed with FileNotFoundError: "
            "the weights",
        ),
        (
            [MODEL, "--step", "models_of_advise:exits_on_rank_1"],
            "error: rank 1: models_of_advise:exits_on_rank_1 failed with SystemExit: 0",
        ),
        ([MODEL, "--step", "models_of_advise:nothing"], "nothing"),
        (
            [MODEL, "--step", "models_of_advise:without_arguments"],
            "must be of the form 'def train_step(model): model(inputs).mean().backward()', "
            "got without_arguments()",
        ),
        ([MODEL, "--step", "models_of_advise"], "MODULE:FUNCTION"),
        ([MODEL, "--ranks", "0"], "matrix_approximation_rank"),
    ],
)
def test_an_error_ends_all_processes_and_one_says_it(
    folder: Path, arguments: list[str], message: str
) -> None:
    (code_0, said), (code_1, silent) = (ended.value for ended in _two(folder, *arguments))
    assert (code_0, code_1) == (2, 2)
    assert message in said
    assert "error:" not in silent
    for rank in range(2):
        reported = ProcessFailure(rank, 0, 2, str(folder / f"error_{rank}.json"))
        assert str(reported.error_file_data["message"]["message"]) in said, "torchrun says the same"


def test_a_process_that_fails_in_the_measurement_leaves_none_waiting(folder: Path) -> None:
    failed, left = _two(folder, MODEL, "--step", "models_of_advise:breaks_rank_0")
    assert "MemoryError: in the middle of a measurement" in failed.value[1]
    assert "Traceback" in left.error, "its group has failed, and it has not waited in vain"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--backward-ms", "-1"],
            "--backward-ms: milliseconds must be a finite number >= 0, got -1",
        ),
        (
            ["--backward-ms", "nan"],
            "--backward-ms: milliseconds must be a finite number >= 0, got nan",
        ),
        (["--backward-ms", "soon"], "--backward-ms: invalid _milliseconds value: 'soon'"),
        (["--backward-ms", "10", "--step", "models_of_advise:step"], "not allowed with"),
        (["--ranks", "1,four"], "--ranks: must be integers separated by commas, got 1,four"),
        (["--wire-dtype", "int8,int2"], "int4, separated by commas, got int8,int2"),
        ([], "torchrun"),
    ],
)
def test_a_wrong_command_line_is_a_usage_error(arguments: list[str], message: str) -> None:
    status, said = command_line.run("advise", MODEL, *arguments)
    assert status == 2
    assert message in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_missing_gpu_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    status, said = command_line.run("advise", MODEL, "--device", "cuda")
    assert status == 2
    assert "--device cuda needs a GPU, and torch sees none here" in said
