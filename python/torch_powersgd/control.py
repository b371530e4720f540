# SPDX-License-Identifier: BSD-3-Clause
"""What a training script says to the backend while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from torch_powersgd._backend import find_backends
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


def set_grad_scale(scale: float, group: dist.ProcessGroup | None = None) -> None:
    """Tells the group the loss scale of the gradients to come, so that residuals follow it.

    Args:
        scale: finite and > 0, such as ``GradScaler.get_scale()``; equal on all ranks.
        group: None: the default group.

    Raises:
        ValueError: if the scale is not finite and > 0, or the group has no powersgd backend.
    """
    for backend in find_backends(group):
        backend.grad_scale = scale
