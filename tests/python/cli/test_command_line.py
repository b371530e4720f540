# SPDX-License-Identifier: BSD-3-Clause
"""The commands as programs, where nothing but the package's own dependencies is installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import bare_environment
import pytest
import torch

import torch_powersgd as tp
from support import command_line
from support.deadline import DEADLOCK
from support.torchrun import torchrun
from torch_powersgd._core import _C

PROGRAM = str(Path(bare_environment.__file__))
MODULE = """
import importlib.util
import torch

from torch_powersgd.cli import rehearsal

assert importlib.util.find_spec("numpy") is None, "it is not hidden"
rehearsal.ROUNDS = (2, 2)

def model():
    return torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.Linear(200, 300))

def deep():
    layer = torch.nn.TransformerEncoderLayer(256, 4, 512)
    model = torch.nn.Module()
    model.a_long_name_of_the_encoder_stack = torch.nn.TransformerEncoder(layer, 12)
    return model

def step(model):
    model(torch.ones(2, 300)).sum().backward()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "models_of_user.py").write_text(MODULE)
    return tmp_path


def _lines(folder: Path, *arguments: str, **variables: str) -> list[str]:
    """The output of a command, which fits 80 columns."""
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    ended = subprocess.run(
        [sys.executable, PROGRAM, *arguments],
        cwd=folder,
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=DEADLOCK,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = ended.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    return lines


def test_the_dependencies_are_those_of_the_package() -> None:
    names = bare_environment.dependencies()
    assert {"torch", "sympy"} <= names
    assert not {"numpy", "pytest", "matplotlib", "rich"} & names


def test_version() -> None:
    _, said = command_line.run("--version")
    built, cuda = said.strip().split("; CUDA kernels: ")
    assert built == f"torch_powersgd {tp.__version__}, built against torch {_C.torch_version}"
    assert cuda in ("yes", "no")


def test_plan(folder: Path) -> None:
    lines = _lines(folder, "plan", "models_of_user:deep", "--rank", "4", "--all")
    rows = [line for line in lines if re.search(r" 4 .* [kM]?B +[\d.]+ *$", line)]
    assert len(rows) == 48
    # A long name goes on in the lines below.
    names = "".join(re.split("  +", line)[0] for line in lines)
    for layer in range(12):
        for name in ("self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear2.weight"):
            assert f"{layer}.{name}" in names


def test_a_reader_that_has_read_enough_sees_no_traceback(folder: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run(
        [sys.executable, PROGRAM, "plan", "models_of_user:model"],
        cwd=folder,
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        timeout=DEADLOCK,
    )
    os.close(writing)
    assert ended.returncode == 1
    assert "BrokenPipe" not in ended.stderr


def test_doctor(folder: Path) -> None:
    words = " ".join(_lines(folder, "doctor", NCCL_DEBUG="WARN", MASTER_PASSWORD="hidden")).split()
    facts = [f"{tp.__version__},", f"{torch.__version__},", f"{_C.torch_version},", "gloo"]
    assert {*facts, f"{_C.cpu_instruction_set()},", "NCCL_DEBUG"} <= set(words)
    assert "hidden" not in words
    assert words[:3] == ["No", "problems", "found:"]


def test_advise_under_torchrun(folder: Path) -> None:
    job = ["models_of_user:model", "--step", "models_of_user:step"]
    setting = ["--ranks", "1,4", "--wire-dtype", "none"]
    ended = torchrun(PROGRAM, "advise", *job, *setting, cwd=folder)
    said = " ".join(ended.stdout.split())
    assert re.search(r"2 processes \(1 host of 2 processes\), \S+ ms apart one way, 482 kB", said)
    assert "The step is models_of_user:step" in said
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
    assert re.match(verdicts, ended.stdout), "before the table"
    line = [line for line in ended.stdout.splitlines() if line.startswith("torch_powersgd.attach(")]
    assert len(line) == ("Compression pays" in said)
    table = [each for each in ended.stdout.splitlines() if each not in line]
    assert max(map(len, table)) <= 80
    assert "No backend of type" not in ended.stderr
    assert "measuring" not in ended.stdout + ended.stderr, "no progress where nobody watches"
