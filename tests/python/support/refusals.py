# SPDX-License-Identifier: BSD-3-Clause
"""Calls that are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def refuses(call: Callable[[], Any], *parts: str) -> None:
    """Asserts that the call raises a ValueError with these words."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is compared below
        call()
    for part in parts:
        assert part in str(caught.value), str(caught.value)
