# SPDX-License-Identifier: BSD-3-Clause
"""Examples that hypothesis draws for tests that take any input: some, or many in the long tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

# The examples are the same at each call: a test fails for the change that it tests. The first
# example of a pool of ranks waits for their start, so none has a limit of time.
FIXED = settings(
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=100,
    suppress_health_check=list(HealthCheck),
)


def examples(some: int, many: int) -> pytest.MarkDecorator:
    """Passes the number of examples to a test as ``count``."""
    return pytest.mark.parametrize("count", [some, pytest.param(many, marks=pytest.mark.long)])


def check_examples(count: int, check: Callable[..., None], *drawn: st.SearchStrategy[Any]) -> None:
    """Calls a check with so many examples of its arguments."""
    settings(FIXED, max_examples=count)(given(*drawn)(check))()
