# SPDX-License-Identifier: BSD-3-Clause
"""Calls that are refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest


def refuses(call: Callable[[], Any], message: str) -> None:
    """Asserts that the call raises a ValueError with these words."""
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
