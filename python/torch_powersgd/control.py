# SPDX-License-Identifier: BSD-3-Clause
"""The functions that a training loop calls between steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from torch_powersgd._core import _C
from torch_powersgd.attach import attached_in, attachment_of
from torch_powersgd.lookup import find_backends
from torch_powersgd.option_values import is_bool, positive, shown
from torch_powersgd.proposal import Module


@contextmanager
def compression(enabled: bool) -> Iterator[None]:
    """Overrides the scope of the all-reduces that are called inside of a ``with`` block.

    The override holds for this thread and for the backward passes that it starts. All ranks must
    enter the same blocks. Enter a block once per step: outside of a backward pass, the order of
    tensors in the block identifies them.

    Args:
        enabled: Whether every eligible all-reduce is compressed: one that is dense, floating, a SUM
            or AVG, and large enough to gain. False makes every all-reduce exact.

    Raises:
        ValueError: If ``enabled`` is not a truth value.
    """
    if not is_bool(enabled):
        raise ValueError(f"enabled must be True or False, got {shown(enabled)}")
    _C.push_override(bool(enabled))
    try:
        yield
    finally:
        _C.pop_override()


def set_grad_scale(scale: float, group: dist.ProcessGroup | None = None) -> None:
    """Sets the loss scale of the next gradients of the modules that are attached in a group.

    A model that is attached with a scaler follows the scaler and does not need this function.

    Args:
        scale: Loss scale, finite and > 0, such as ``GradScaler.get_scale()``. It is equal on all
            ranks.
        group: Process group. None: the default group.

    Raises:
        ValueError: If the scale is not finite and > 0, or the group has no powersgd backend.
    """
    found = positive("grad_scale", scale)
    find_backends(group)
    for reducer in attached_in(group):
        reducer.states.grad_scale = found


def step_skipped(module: Module) -> None:
    """Delivers the gradients of the last synchronized backward pass later.

    Call it if they were good and the optimizer did not apply them. The residuals keep what the pass
    sent, and the next step sends it again. If the gradients were bad, call ``discard_step``. All
    ranks must call it after the backward pass and before the next one. ``attach(module,
    scaler=...)`` does it by itself.

    Raises:
        ValueError: If the module is not attached.
    """
    attachment_of(module).model.states.step_skipped()


def discard_step(module: Module) -> None:
    """Forgets the gradients of the last synchronized backward pass.

    Call it if they were bad, such as those of a loss spike, and the optimizer did not apply them.
    The residuals and factors become what they were before the pass, to the bit. All ranks must call
    it after the backward pass and before the next one.

    Raises:
        ValueError: If the module is not attached, or its options lack ``allow_discard``.
    """
    attachment_of(module).model.states.discard_step()
