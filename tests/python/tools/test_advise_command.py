# SPDX-License-Identifier: BSD-3-Clause
"""torchrun -m torch_powersgd advise as a program: its output, its errors, how its processes end."""

from __future__ import annotations

import contextlib
import io
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import torch_powersgd.__main__
from support import ranks
from support.torchrun import torchrun

MODULE = """
import os
import torch

def model():
    return torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.Linear(200, 300))

def forward(model):
    model(torch.ones(2, 300))

def step(model):
    model(torch.randn(8, 300)).square().mean().backward()

def missing_on_rank_0():
    if os.environ["RANK"] == "0":
        raise FileNotFoundError("the weights")
    return model()

calls = []

def breaks_rank_0(model):
    calls.append(1)
    if len(calls) > 10 and os.environ["RANK"] == "0":
        raise MemoryError("in the middle of a measurement")
    step(model)

def without_arguments():
    pass
"""
COMMAND = ["torch_powersgd", "advise"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "models_of_advise.py").write_text(MODULE)
    return tmp_path


def _usage_error(*arguments: str) -> str:
    """Runs the command in this process, which it must refuse; returns its standard error."""
    with (
        contextlib.redirect_stderr(io.StringIO()) as heard,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(sys, "argv", [*COMMAND, "models_of_advise:model", *arguments])
        with pytest.raises(SystemExit) as ended:
            torch_powersgd.__main__.main()
    assert ended.value.code == 2
    return heard.getvalue()


def _run_rank(rank: int, folder: Path, port: int, arguments: list[str]) -> tuple[object, str]:
    """Runs the command on a rank; returns its exit code and its standard error."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    os.environ.update(**address, RANK=str(rank), LOCAL_RANK=str(rank))
    sys.path.insert(0, str(folder))
    sys.argv = [*COMMAND, *arguments]
    with contextlib.redirect_stderr(io.StringIO()) as heard:
        try:
            return torch_powersgd.__main__.main(), heard.getvalue()
        except SystemExit as error:
            return error.code, heard.getvalue()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def _two(folder: Path, *arguments: str) -> list[tuple[int, str, str]]:
    """Runs two ranks without a supervisor: each has to end by itself."""
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": "2"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", *COMMAND, *arguments],
            cwd=folder,
            env={**os.environ, **group, "RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    try:
        ended = [process.communicate(timeout=100) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(p.returncode, out, err) for p, (out, err) in zip(processes, ended, strict=True)]


def test_under_torchrun(folder: Path) -> None:
    arguments = ["models_of_advise:model", "--backward-ms", 2, "--ranks", 1, 4]
    ended = torchrun("-m", *COMMAND, *arguments, "--wire-dtype", "float32", cwd=folder)
    said = " ".join(ended.stdout.split())
    assert "2 processes, 482 kB of gradients." in said
    assert "The step is a stand-in, whose backward pass takes 2 ms." in said
    row = r"^(\w.*?)  +[\d.]+  +[\d.]+ to [\d.]+(?:  +([\d.]+ kB))?"
    rows = re.findall(row, ended.stdout, re.MULTILINE)
    assert rows == [
        ("no averaging", ""),
        ("plain gloo", "482 kB"),
        ("matrix rank 1, float32", "6.01 kB"),
        ("matrix rank 4, float32", "18.0 kB"),
    ]
    verdicts = "Compression pays here|Compression does not pay here|Too noisy to tell"
    assert len(re.findall(verdicts, ended.stdout)) == 1, "on one process"
    pays = "Compression pays" in ended.stdout
    assert ("\ntorch_powersgd.attach(ddp, torch_powersgd.Options" in ended.stdout) == pays
    assert "No backend of type" not in ended.stderr


def test_an_error_before_the_measurement_is_said_once(folder: Path) -> None:
    job = (folder, _free_port(), ["models_of_advise:missing_on_rank_0"])
    (code_0, said), (code_1, silent) = ranks.run(2, _run_rank, *job, backend=None)
    assert (code_0, code_1) == (2, 2)
    assert "error: rank 0: FileNotFoundError: the weights" in said
    assert "error" not in silent


def test_a_process_that_fails_in_the_measurement_leaves_none_waiting(folder: Path) -> None:
    (code_0, _, said), (code_1, _, _) = _two(
        folder, "models_of_advise:model", "--step", "models_of_advise:breaks_rank_0"
    )
    assert code_0 != 0
    assert code_1 != 0
    assert "in the middle of a measurement" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", "models_of_advise:forward"], "must call backward"),
        (["--step", "models_of_advise:nothing"], "nothing"),
        (
            ["--step", "models_of_advise:without_arguments"],
            "must be of the form 'def train_step(model): model(inputs).mean().backward()', "
            "got without_arguments()",
        ),
        (["--step", "models_of_advise"], "MODULE:FUNCTION"),
        (["--ranks", "0"], "matrix_approximation_rank"),
    ],
)
def test_a_wrong_argument_ends_all_processes(
    folder: Path, arguments: list[str], message: str
) -> None:
    job = (folder, _free_port(), ["models_of_advise:model", *arguments])
    (code_0, said), (code_1, silent) = ranks.run(2, _run_rank, *job, backend=None)
    assert (code_0, code_1) == (2, 2)
    assert message in said
    assert "Traceback" not in said + silent


@pytest.mark.parametrize("milliseconds", ["-1", "nan", "inf", "soon"])
def test_a_backward_pass_that_cannot_be(milliseconds: str) -> None:
    said = _usage_error("--backward-ms", milliseconds)
    assert "--backward-ms" in said
    assert milliseconds in said


def test_the_step_is_measured_or_given() -> None:
    said = _usage_error("--backward-ms", "10", "--step", "models_of_advise:forward")
    assert "not allowed with" in said


def test_without_torchrun_it_says_how() -> None:
    assert "torchrun" in _usage_error()
