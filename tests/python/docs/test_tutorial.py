# SPDX-License-Identifier: BSD-3-Clause
"""The program of docs/tutorial.md trains with each method, and prints what the page shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from markdown_blocks import blocks_of_page

from support.launch import run_program
from support.repository import ROOT

STEPS = 30


@pytest.mark.parametrize("method", ["plain", "attach", "local"])
def test_the_program_trains(method: str, tmp_path: Path) -> None:
    blocks = blocks_of_page(ROOT / "docs/tutorial.md")
    program = tmp_path / "train.py"
    program.write_text(next(block.code for block in blocks if block.language == "python"))
    first, _ = run_program(program, method, STEPS, folder=tmp_path)
    shown = "\n".join(block.code for block in blocks if block.language == "text")
    losses = [float(loss) for loss in re.findall(r"loss (\d\.\d+)", first.stdout)]
    assert len(losses) == STEPS // 10
    assert losses[-1] < losses[0]
    for line in first.stderr.splitlines():
        if line.startswith("torch_powersgd:"):
            assert line.partition("; all processes")[0] in shown
