# SPDX-License-Identifier: BSD-3-Clause
""".ci/check_text.py finds words that are not used, and long lines."""

from __future__ import annotations

import pytest
from programs import load

LINK = f"[text](https://example.org/{'x' * 90}) and more"
TABLE = "| " + "x" * 120 + " |"


@pytest.mark.parametrize(
    ("path", "line", "found"),
    [
        ("csrc/engine/engine.h", "  int lane_;", "lane_: channel; a lane is SIMD's alone"),
        ("csrc/kernels/cpu/simd/vector.h", "// Each lane is one element.", ""),
        ("csrc/group/session.cpp", "  owed_.find(index);", "owed_: residual"),
        ("tests/python/test_stats.py", "def test_the_licence():", "licence: American spelling"),
        ("docs/algorithm.md", "It is normalised.", "normalised: American spelling"),
        ("docs/algorithm.md", "Noise, otherwise a precise exercise.", ""),
        ("docs/algorithm.md", "x" * 101, "101 columns: at most 100"),
        ("csrc/core/plan.inl", "//" + "x" * 99, "101 columns: at most 100"),
        ("docs/algorithm.md", f"{LINK}\n{TABLE}\n```text\n{'x' * 101}\n```\n{'x' * 100}", ""),
    ],
)
def test_what_is_found(path: str, line: str, found: str) -> None:
    lines = list(load("check_text").findings(path, line))
    assert lines == ([f"{path}:1: {found}"] if found else [])
