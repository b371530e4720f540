# SPDX-License-Identifier: BSD-3-Clause
"""Hypothesis examples for property-based tests: some, or many in the long tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

# Examples are the same in each run, so that a test only fails because of a change. There is no
# deadline, because the first example for a rank pool waits for the pool to start.
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
    """Calls a check with ``count`` examples of its arguments."""
    settings(FIXED, max_examples=count)(given(*drawn)(check))()
