# SPDX-License-Identifier: BSD-3-Clause
"""The functions that a training loop calls between steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from torch_powersgd._backend import find_backends
from torch_powersgd._core import _C
from torch_powersgd.attach import attachment_of
from torch_powersgd.proposal import Module


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


def set_grad_scale(scale: float, group: dist.ProcessGroup | None = None) -> None:
    """Tells a group the loss scale of the gradients to come, which its residuals then follow.

    A model that is attached with a scaler follows the scaler and does not need this function.

    Args:
        scale: Loss scale, finite and > 0, such as ``GradScaler.get_scale()``. It is equal on all
            ranks.
        group: Process group. None: the default group.

    Raises:
        ValueError: If the scale is not finite and > 0, or the group has no powersgd backend.
    """
    for backend in find_backends(group):
        backend.grad_scale = scale


def step_skipped(module: Module) -> None:
    """Says that the optimizer did not apply the gradients of the last synchronised backward pass.

    The residuals keep what they delivered, and deliver it again. All ranks must call it after the
    backward pass and before the next one. ``attach(module, scaler=...)`` does it by itself.

    Raises:
        ValueError: If the module is not attached.
    """
    attachment_of(module).model.step_skipped()
