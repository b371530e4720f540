# SPDX-License-Identifier: BSD-3-Clause
"""The programs of docs/first-step-*.md print what the pages say, and write traces with spans."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.markdown_blocks import blocks_of_page
from support.repository import ROOT
from support.torchrun import torchrun

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
    (tmp_path / "train.py").write_text(program.program())
    ended = torchrun("train.py", cwd=tmp_path)
    command, said, *printed = shown.code.splitlines()
    assert command == "$ torchrun --nproc-per-node 2 train.py"
    assert said in ended.stderr.splitlines()
    assert ended.stdout.splitlines() == printed
    for rank in range(2):
        events = json.loads((tmp_path / traces.format(rank)).read_text())["traceEvents"]
        assert {event["name"] for event in events} >= SPANS
