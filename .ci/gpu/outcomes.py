# SPDX-License-Identifier: BSD-3-Clause
"""Reads the outcome of each test from a log, which a crash or a hang may have cut short."""

from __future__ import annotations

import re

PASSED, FAILED, SKIPPED, NO_END = "passed", "FAILED", "skipped", "NO END"
HARMLESS = (PASSED, SKIPPED)

_GOOGLETEST = re.compile(r"^\[ +(RUN|OK|FAILED|SKIPPED) +\] ([^\s,]+\.[^\s,]+)", re.MULTILINE)
# pytest -v names a test when it begins, and completes the line when it ends. Its list of warnings
# names tests once more.
_PYTEST = re.compile(r"^(\S+\.py::.+?)(?: (PASSED|FAILED|ERROR|SKIPPED)\b.*)?$", re.MULTILINE)
_ENDS = {"RUN": NO_END, "": NO_END, "OK": PASSED, "PASSED": PASSED, "SKIPPED": SKIPPED}


def googletest(log: str) -> dict[str, str]:
    return {name: _ENDS.get(word, FAILED) for word, name in _GOOGLETEST.findall(log)}


def pytest(log: str) -> dict[str, str]:
    log = log.partition(" warnings summary ")[0]
    return {name.rstrip(): _ENDS.get(word, FAILED) for name, word in _PYTEST.findall(log)}
