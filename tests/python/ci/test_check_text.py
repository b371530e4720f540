# SPDX-License-Identifier: BSD-3-Clause
""".ci/check_text.py finds words that are not used, and long lines of Markdown and C++."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import load

check_text = load("check_text")


def _numbers(path: str, *lines: str) -> list[str]:
    """The numbers of the lines with findings."""
    found = check_text.findings_of(path, "\n".join(lines) + "\n")
    return [finding.place.removeprefix(f"{path}:") for finding in found]


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("csrc/engine/engine.h", "  BackendLane* channel_;"),
        ("csrc/engine/engine.h", "  int lane_;"),
        ("csrc/gradients/session.cpp", "  const auto owed = owed_.find(index);"),
        ("python/torch_powersgd/stats.py", "# Nothing but for the first, see DESIGN."),
        ("tests/python/test_stats.py", "def test_the_licence():"),
        ("docs/algorithm.md", "It is quantised and then normalised."),
    ],
)
def test_a_word_that_is_not_used_is_found(path: str, line: str) -> None:
    assert _numbers(path, "", line)[:1] == ["2"]


def test_other_words_are_not_found() -> None:
    assert _numbers("csrc/kernels/cpu/simd/vector.h", "// Each lane is one element.") == []
    assert _numbers("docs/algorithm.md", "Noise, otherwise a precise exercise.") == []


def test_a_long_line_is_found() -> None:
    link = f"[text](https://example.org/{'x' * 90}) and more"
    table = "| " + "x" * 120 + " |"
    code = ["```text", "x" * 101, "```"]
    lines = ["short", "x" * 101, link, table, *code, "x" * 101, "x" * 100]
    assert _numbers("docs/algorithm.md", *lines) == ["2", "8"]
    assert _numbers("csrc/plan/plan.inl", "//" + "x" * 98, "//" + "x" * 99) == ["2"]


def test_a_finding_names_the_place_the_word_and_the_remedy(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "page.md"
    file.write_text("fine\nIts behaviour.\n")
    assert check_text.main([str(file)]) == 1
    assert capsys.readouterr().out == f"{file}:2: behaviour: American spelling\n"
