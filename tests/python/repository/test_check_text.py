# SPDX-License-Identifier: BSD-3-Clause
""".ci/check_text.py finds words that are not used, and long lines of Markdown and C++."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from support.repository import ROOT

PROGRAM = ROOT / ".ci" / "check_text.py"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_text", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclass looks there
    spec.loader.exec_module(module)
    return module


check_text = _load()


def _places(path: str, *lines: str) -> list[str]:
    found = check_text.findings_of(path, "\n".join(lines) + "\n")
    return [finding.place.removeprefix(f"{path}:") for finding in found]


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("csrc/kernels/cpu/pack.h", "    Met<F> met;"),
        ("csrc/kernels/cpu/pack.h", "  flags.look_at_m(value);"),
        ("csrc/kernels/cuda/work.cuh", "  tell_all(status);"),
        ("csrc/kernels/cuda/form_m.cuh", "  int32_t memory_dtype;"),
        ("csrc/engine/engine.h", "  BackendLane* channel_;"),
        ("csrc/engine/engine.h", "  int lane_;"),
        ("csrc/gradients/session.cpp", "  const auto owed = owed_.find(index);"),
        ("python/torch_powersgd/stats.py", "# Nothing but for the first, see DESIGN."),
        ("tests/python/test_stats.py", "def test_the_licence():"),
        ("docs/algorithm.md", "It is quantised and then normalised."),
        ("docs/algorithm.md", "What a rank is owed stays owed."),
    ],
)
def test_a_word_that_is_not_used_is_found(path: str, line: str) -> None:
    assert _places(path, "", line)[:1] == ["2"]


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("csrc/kernels/cpu/simd/vector.h", "// Each lane is one element."),
        ("csrc/plan/plan.cpp", "  // The step of the lead. It tells what (of all) is planned."),
        ("docs/algorithm.md", "What compression costs: noise, otherwise a precise exercise."),
    ],
)
def test_other_words_are_not_found(path: str, line: str) -> None:
    assert _places(path, line) == []


def test_a_long_line_is_found() -> None:
    link = f"[text](https://example.org/{'x' * 90}) and more"
    table = "| " + "x" * 120 + " |"
    picture = f'  <img src="{"x" * 100}">'
    code = ["```text", "x" * 101, "```", "```python", "x" * 101, "```"]
    lines = ["short", "x" * 101, link, table, picture, *code, "x" * 101, "x" * 100]
    assert _places("docs/algorithm.md", *lines) == ["2", "12"]
    assert _places("csrc/plan/plan.inl", "//" + "x" * 98, "//" + "x" * 99) == ["2"]
    assert _places("docs/_tables.py", *lines) == []


def test_a_finding_names_the_place_the_word_and_the_remedy(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "page.md"
    file.write_text("fine\nIts behaviour.\n")
    assert check_text.main([str(file)]) == 1
    assert capsys.readouterr().out == f"{file}:2: behaviour: American spelling\n"
    file.write_text("Its behavior.\n")
    assert check_text.main([str(file)]) == 0
