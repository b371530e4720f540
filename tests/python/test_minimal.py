# SPDX-License-Identifier: BSD-3-Clause
"""examples/minimal.py, which the README shows as a diff of an ordinary script."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from torchrun import torchrun

ROOT = Path(__file__).parents[2]
MINIMAL = ROOT / "examples" / "minimal.py"
EXACT_STEPS = 10
STEPS = 20
PARAMETERS = 512 * 2048 + 2048 + 2048 * 512 + 512


def _readme_diff() -> list[str]:
    blocks = re.findall(r"^```diff\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    assert len(blocks) == 1
    return blocks[0].splitlines()


def _side(sign: str) -> str:
    """The script with the lines of one sign, and those without any."""
    lines = _readme_diff()
    assert {line[:2] for line in lines} <= {"+ ", "- ", "  ", ""}
    return textwrap.dedent("\n".join("  " + x[2:] for x in lines if x[:1] in (sign, " ", "")))


def test_the_example_compresses_within_its_steps_and_says_so():
    source = MINIMAL.read_text()
    assert len(source.splitlines()) <= 40
    assert f"range({STEPS})" in source

    ended = torchrun(MINIMAL)
    assert f"from step {EXACT_STEPS}" in ended.stderr
    assert ended.stderr.count("torch_powersgd:") == 1  # on one rank only
    said = re.search(r"sent ([\d,]+) bytes in place of ([\d,]+)", ended.stdout)
    assert said, ended.stdout
    after, before = (int(count.replace(",", "")) for count in said.groups())
    assert before == 4 * PARAMETERS
    assert 40 * after < before


def test_the_readme_shows_the_example():
    shown = _side("+")
    assert len(shown.splitlines()) > 20
    # All of it: what is left of the file is its head.
    head, found, tail = MINIMAL.read_text().partition(shown.strip("\n"))
    assert found
    assert head.lstrip().startswith("# SPDX")
    assert "import" not in head
    assert not tail.strip()


def test_what_the_readme_begins_with_is_an_ordinary_script(tmp_path):
    ordinary = _side("-")
    assert "powersgd" not in ordinary
    program = tmp_path / "ordinary.py"
    program.write_text(ordinary)
    torchrun(program)
