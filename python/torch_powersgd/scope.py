# SPDX-License-Identifier: BSD-3-Clause
"""The scope of the all-reduces in a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch_powersgd._core import _C
from torch_powersgd.option_values import require

_SCOPES = {"always": True, "never": False}


@contextmanager
def scope(scope: str) -> Iterator[None]:
    """Overrides ``Options.scope`` for the all-reduces that are called in a ``with`` block.

    The override holds for this thread and for the backward passes that it starts. Every process
    must enter the same blocks. Enter a block once per step: outside of a backward pass, tensors are
    identified by their order in the block.

    Args:
        scope: ``"always"`` compresses every eligible all-reduce: one that is dense, floating, a SUM
            or AVG, and large enough to gain. ``"never"`` makes every all-reduce exact.

    Raises:
        ValueError: If ``scope`` is anything else.
    """
    allowed = isinstance(scope, str) and scope in _SCOPES
    require(allowed, "scope", "'always' or 'never'", scope)
    _C.push_override(_SCOPES[scope])
    try:
        yield
    finally:
        _C.pop_override()
