# SPDX-License-Identifier: BSD-3-Clause
"""examples/minimal.py, which the README shows as a diff of an ordinary script."""

from __future__ import annotations

import re
from pathlib import Path

from support.repository import ROOT
from support.torchrun import torchrun

MINIMAL = ROOT / "examples" / "minimal.py"
EXACT_STEPS = 10
STEPS = 20


def _readme_diff() -> list[str]:
    blocks: list[str] = re.findall(
        r"^```diff\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S
    )
    assert len(blocks) == 1
    return blocks[0].splitlines()


def _side(sign: str) -> str:
    """The script of the lines with this sign and of those without one."""
    lines = _readme_diff()
    assert {line[:1] for line in lines} <= {"+", "-", " ", ""}
    return "\n".join(line[1:] for line in lines if line[:1] in (sign, " ", ""))


def _readme_output() -> str:
    """The example's output in the README, as one line."""
    command = "$ torchrun --nproc-per-node 2 examples/minimal.py\n"
    printed = (ROOT / "README.md").read_text().partition(command)[2].partition("```")[0]
    return " ".join(printed.split())


def test_the_example_compresses_within_its_steps_and_says_so() -> None:
    source = MINIMAL.read_text()
    assert len(source.splitlines()) <= 40
    assert f"range({STEPS})" in source

    ended = torchrun(MINIMAL)
    said = [line for line in ended.stderr.splitlines() if line.startswith("torch_powersgd:")]
    assert len(said) == 1  # by one rank
    assert f"from step {EXACT_STEPS} on" in said[0]
    ratio = re.search(r"sent (\S+) times fewer bytes", ended.stdout)
    assert ratio, ended.stdout
    assert float(ratio[1]) > 40

    assert " ".join([*said, ended.stdout.strip()]) == _readme_output()


def test_the_readme_has_all_of_its_figures() -> None:
    readme = (ROOT / "README.md").read_text()
    assert "@@" not in readme
    assert len(readme.splitlines()) <= 150


def test_the_readme_shows_the_head_of_the_example() -> None:
    shown = _side("+").strip("\n")
    assert "torch_powersgd.attach(ddp)" in shown
    before, _, after = MINIMAL.read_text().partition(shown)
    assert after
    assert "import" not in before


def test_what_the_readme_begins_with_is_an_ordinary_script(tmp_path: Path) -> None:
    ordinary = _side("-")
    assert "powersgd" not in ordinary
    program = tmp_path / "ordinary.py"
    program.write_text(ordinary)
    torchrun(program)
