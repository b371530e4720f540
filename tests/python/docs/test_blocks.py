# SPDX-License-Identifier: BSD-3-Clause
"""Every block of code in README and docs runs, or says why not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from markdown_blocks import (
    PAGES,
    PROGRAMS,
    SHELL,
    BadBlock,
    Block,
    blocks_of,
    blocks_of_page,
    run_block,
)

import torch_powersgd
from support.deadline import DEADLOCK
from support.repository import ROOT

# This model stands where the docs have one of the reader's.
MODELS = """
import torch


def make_model():
    return torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 64))


def train_step(model):
    model(torch.randn(8, 256)).square().mean().backward()
"""

BLOCKS = [block for page in PAGES for block in blocks_of_page(page)]


def _to_run(languages: set[str]) -> list[object]:
    chosen = [block for block in BLOCKS if block.language in languages and not block.why_not]
    return [pytest.param(block, id=block.place) for block in chosen]


@pytest.mark.parametrize("block", _to_run(PROGRAMS))
def test_a_program_runs(block: Block, tmp_path: Path) -> None:
    run_block(block, tmp_path)


@pytest.mark.parametrize("block", _to_run(SHELL))
def test_a_command_runs(block: Block, tmp_path: Path) -> None:
    for entry in ROOT.iterdir():
        if not entry.name.startswith("."):
            (tmp_path / entry.name).symlink_to(entry)
    (tmp_path / "train.py").write_bytes((ROOT / "examples" / "minimal.py").read_bytes())
    for module in ("mymodels.py", "mypackage/models.py"):
        (tmp_path / module).parent.mkdir(exist_ok=True)
        (tmp_path / module).write_text(MODELS)
    package = str(Path(torch_powersgd.__file__).parents[1])
    script = tmp_path / "bin" / "powersgd"  # of the package that is tested, installed or not
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m torch_powersgd "$@"\n')
    script.chmod(0o755)
    folders = script.parent, Path(sys.executable).parent, os.environ["PATH"]
    path = os.pathsep.join(map(str, folders))
    ended = subprocess.run(
        ["bash", "-eu", "-c", block.code],
        cwd=tmp_path,
        env={**os.environ, "PATH": path, "PYTHONPATH": package, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLOCK,
    )
    assert ended.returncode == 0, ended.stdout[-1000:] + ended.stderr[-3000:]


def test_what_is_not_run_is_well_formed() -> None:
    blocks = [block for block in BLOCKS if block.why_not]
    assert {block.language for block in blocks} >= {"python", "bash"}
    for block in blocks:
        if block.language in PROGRAMS:
            compile(block.program(), block.place, "exec")
        else:
            command = ["bash", "-n", "-c", block.code]
            parsed = subprocess.run(command, capture_output=True, text=True)
            assert parsed.returncode == 0, f"{block.place}: {parsed.stderr}"


@pytest.mark.parametrize(
    "text",
    [
        "```\nunknown\n```",
        "```console\n$ x\n```",
        "```python\nx",
        "<!-- not run -->\n```python\nx\n```",
        "<!-- not run: slow -->\n```python\nx\n```",
        "<!-- run with: -->\n```python\nx\n```",
        "<!-- run with: ddp -->\n```bash\nx\n```",
        "<!-- run with: ddp -->\n\n```python\nx\n```",
        "<!-- not run: it is only text -->\n```text\nx\n```",
        "Text.\n\n    indented\n",
    ],
)
def test_a_block_without_a_right_comment_is_found(text: str) -> None:
    with pytest.raises(BadBlock, match=r"page.md:\d"):
        blocks_of(f"{text}\n", "page.md")


def test_a_block_that_fails_is_found(tmp_path: Path) -> None:
    block = Block("page.md", 41, "python", "import torch\ntorch.no_such_function()\n")
    with pytest.raises(Exception, match=r'page.md", line 43'):
        run_block(block, tmp_path)
