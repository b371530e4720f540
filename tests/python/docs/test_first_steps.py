# SPDX-License-Identifier: BSD-3-Clause
"""The first programs that a reader meets print what the pages say: README and first-step-*.md."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from markdown_blocks import blocks_of_page

from support.launch import run_program
from support.repository import ROOT
from support.torchrun import warnings_in

README = ROOT / "README.md"
MINIMAL = ROOT / "examples" / "minimal.py"
EXACT_STEPS = 10
SPANS = {
    "powersgd:all_reduce",
    "powersgd::project",
    "powersgd::reduce_p",
    "powersgd::orthogonalize",
    "powersgd::back_project",
    "powersgd::reduce_q",
    "powersgd::reconstruct",
}


@pytest.mark.parametrize(
    ("page", "traces"), [("ddp", "trace_{}.json"), ("accelerate", "traces/profile_{}.json")]
)
def test_a_first_step_is_as_its_page_says(page: str, traces: str, tmp_path: Path) -> None:
    if page == "accelerate" and find_spec("accelerate") is None:
        pytest.skip("needs accelerate")
    blocks = blocks_of_page(ROOT / "docs" / f"first-step-{page}.md")
    (program,) = (block for block in blocks if block.language == "python")
    (shown,) = (block for block in blocks if block.language == "text")
    command, said, *printed = shown.code.splitlines()
    assert command == "$ torchrun --nproc-per-node 2 train.py"
    (tmp_path / "train.py").write_text(program.code)
    first, second = run_program(tmp_path / "train.py", folder=tmp_path)
    assert said in first.stderr.splitlines()
    assert not warnings_in(first.stderr + second.stderr)
    assert first.stdout.splitlines() == printed
    for rank in range(2):
        events = json.loads((tmp_path / traces.format(rank)).read_text())["traceEvents"]
        assert {event["name"] for event in events} >= SPANS


def test_the_minimal_example_prints_what_the_readme_shows(tmp_path: Path) -> None:
    assert len(MINIMAL.read_text().splitlines()) <= 40
    first, second = run_program(MINIMAL, folder=tmp_path)
    assert "torch_powersgd" not in second.stderr
    (said,) = (line for line in first.stderr.splitlines() if line.startswith("torch_powersgd:"))
    assert f"from step {EXACT_STEPS} on; all processes run on this host" in said
    ratio = re.search(r"sent (\S+) times fewer bytes", first.stdout)
    assert ratio, first.stdout
    assert float(ratio[1]) > 40
    command = "$ torchrun --nproc-per-node 2 examples/minimal.py\n"
    shown = README.read_text().partition(command)[2].partition("```")[0]
    assert shown.split() == [*said.split(), *first.stdout.split()]


def test_the_local_steps_example_prints_what_its_page_shows(tmp_path: Path) -> None:
    example = ROOT / "examples" / "local_steps.py"
    assert len(example.read_text().splitlines()) <= 40
    first, _ = run_program(example, folder=tmp_path)
    page = blocks_of_page(ROOT / "docs" / "local-steps.md")
    (shown,) = (block.code for block in page if block.language == "text")
    command, *said = shown.splitlines()
    assert command == "$ torchrun --nproc-per-node 2 examples/local_steps.py"
    assert said == [*first.stderr.splitlines(), *first.stdout.splitlines()]


def test_the_readme_shows_the_minimal_example_as_a_diff(tmp_path: Path) -> None:
    (diff,) = (block for block in blocks_of_page(README) if block.language == "diff")
    assert "@@" not in diff.code
    shown = diff.program().strip("\n")
    assert "compression = torch_powersgd.attach(ddp)" in shown
    before, _, after = MINIMAL.read_text().partition(shown)
    assert after
    assert "import" not in before
    ordinary = diff.program(dropped="+")
    assert "powersgd" not in ordinary
    (tmp_path / "ordinary.py").write_text(ordinary)
    run_program(tmp_path / "ordinary.py", folder=tmp_path)


def test_the_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 150
