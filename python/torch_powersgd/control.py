# SPDX-License-Identifier: BSD-3-Clause
"""What a training script says to the backend while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch_powersgd._core import _C


@contextmanager
def compression(enabled: bool) -> Iterator[None]:
    """Overrides the scope for the all-reduces called inside, in this thread and in its backwards.

    ``compression(False)`` makes all of them exact. ``compression(True)`` compresses every
    eligible one (dense, floating, SUM or AVG, large enough to pay); outside of backward, tensors
    are told apart by their order in the block, so enter it once per step. All ranks must do the
    same.
    """
    _C.push_override(bool(enabled))
    try:
        yield
    finally:
        _C.pop_override()
