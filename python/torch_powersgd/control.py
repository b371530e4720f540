# SPDX-License-Identifier: BSD-3-Clause
"""The switch between exact and compressed all-reduces inside of a training script."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch_powersgd._core import _C


@contextmanager
def compression(enabled: bool) -> Iterator[None]:
    """Overrides the scope of the all-reduces that are called inside of a ``with`` block.

    The override holds for this thread and for the backward passes that it starts. All ranks must
    enter the same blocks. Outside of a backward pass, tensors are told apart by their order in the
    block: enter it once per step.

    Args:
        enabled: True: every eligible all-reduce is compressed, which is dense, floating, a SUM or
            AVG, and large enough to gain. False: every all-reduce is exact.
    """
    _C.push_override(bool(enabled))
    try:
        yield
    finally:
        _C.pop_override()
