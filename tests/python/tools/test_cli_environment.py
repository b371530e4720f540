# SPDX-License-Identifier: BSD-3-Clause
"""The command line in an environment that has the package's own dependencies and nothing else."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torch_powersgd as tp
from setup_support.metadata import requirements
from support import bare_environment
from support.torchrun import torchrun

PROGRAM = str(Path(bare_environment.__file__))
MODULE = """
import torch

def model():
    return torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.Linear(200, 300))

def deep():
    layer = torch.nn.TransformerEncoderLayer(256, 4, 512)
    model = torch.nn.Module()
    model.a_long_name_of_the_encoder_stack = torch.nn.TransformerEncoder(layer, 12)
    return model

def step(model):
    model(torch.ones(2, 300)).sum().backward()

def imports_numpy():
    import numpy
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "models_of_user.py").write_text(MODULE)
    return tmp_path


def _environment(**variables: str) -> dict[str, str]:
    return {name: v for name, v in os.environ.items() if name != "COLUMNS"} | variables


def _run(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, PROGRAM, *arguments],
        cwd=folder,
        env=_environment(**variables),
        capture_output=True,
        text=True,
        timeout=150,
    )


def test_the_environment_has_the_dependencies_alone(folder: Path) -> None:
    names = bare_environment.closure(requirements())
    assert {"torch", "sympy"} <= names
    assert not {"numpy", "pytest", "matplotlib", "rich"} & names
    ended = _run(folder, "plan", "models_of_user:imports_numpy")
    assert ended.returncode == 2
    assert "No module named 'numpy'" in ended.stderr


def test_version(folder: Path) -> None:
    ended = _run(folder, "--version")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith(f"torch_powersgd {tp.__version__}, built against torch ")
    assert torch.__version__.split("+")[0] in ended.stdout
    assert ended.stdout.strip().split("CUDA kernels: ")[1] in ("yes", "no")


@pytest.mark.parametrize("arguments", [[], ["--all"]], ids=["grouped", "all"])
def test_plan_in_80_columns(folder: Path, arguments: list[str]) -> None:
    ended = _run(folder, "plan", "models_of_user:deep", "--rank", "4", *arguments)
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    rows = [line for line in lines if re.search(r" 4 .* [kM]?B +[\d.]+ *$", line)]
    assert len(rows) == (48 if arguments else 4)
    assert "…" not in ended.stdout, "nothing is cut off"
    # A long name goes on in the lines below.
    names = "".join(re.split("  +", line)[0] for line in lines)
    for layer in map(str, range(12)) if arguments else "*":
        for name in ("self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear2.weight"):
            assert f"{layer}.{name}{'' if arguments else ' (12)'}" in names


def test_plan_on_a_terminal_and_in_a_pipe_says_the_same(folder: Path) -> None:
    main, worker = pty.openpty()
    command = [sys.executable, PROGRAM, "plan", "models_of_user:deep"]
    environment = _environment(TERM="dumb", COLUMNS="80")
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=worker) as process:
        os.close(worker)
        shown = b""
        while True:
            try:
                part = os.read(main, 4096)
            except OSError:  # the end of a terminal
                break
            if not part:
                break
            shown += part
        assert process.wait(100) == 0
    os.close(main)
    piped = _run(folder, "plan", "models_of_user:deep").stdout
    assert shown.decode().replace("\r\n", "\n") == piped


def test_advise_in_80_columns(folder: Path) -> None:
    ended = torchrun(
        PROGRAM, "advise", "models_of_user:model", "--step", "models_of_user:step", "--ranks", 4,
        cwd=folder,
    )  # fmt: skip
    table = [line for line in ended.stdout.splitlines() if not line.startswith("torch_powersgd.")]
    assert max(map(len, table)) <= 80
    assert "matrix rank 4, int8" in ended.stdout
    assert "The step is that of models_of_user:step" in ended.stdout
    assert "No backend of type" not in ended.stderr
    assert "measuring" not in ended.stdout + ended.stderr, "no progress where nobody watches"
