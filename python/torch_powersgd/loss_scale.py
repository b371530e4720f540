# SPDX-License-Identifier: BSD-3-Clause
"""Mixed precision: residuals follow the loss scale, and know the steps that are skipped."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from torch_powersgd._backend import find_backends
from torch_powersgd._core import _C


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


def follow(
    scaler: torch.amp.GradScaler, model: _C.AttachedModel, parameters: Sequence[torch.Tensor]
) -> None:
    """Lets ``model``, which has these parameters, know the scaler's scale and skipped steps.

    A scaler has no hooks: its ``scale`` and ``step`` are wrapped, on this one object.
    """
    if scaler.is_enabled():
        _wrap_scale(scaler, model)
        _wrap_step(scaler, model, parameters)


def _wrap_scale(scaler: torch.amp.GradScaler, model: _C.AttachedModel) -> None:
    inner = scaler.scale
    known: tuple[int, int] | None = None

    @functools.wraps(inner)
    def scale(outputs: Any) -> Any:
        nonlocal known
        scaled = inner(outputs)
        assert scaler._scale is not None  # made by its first scale()
        # Reading the scale waits for the device, so only when it has been written to.
        written = (id(scaler._scale), scaler._scale._version)
        if written != known:
            model.grad_scale, known = scaler.get_scale(), written
        return scaled

    scaler.scale = scale  # type: ignore[method-assign]


def _wrap_step(
    scaler: torch.amp.GradScaler, model: _C.AttachedModel, parameters: Sequence[torch.Tensor]
) -> None:
    inner = scaler.step
    device = parameters[0].device
    mine = {id(parameter) for parameter in parameters}

    @functools.wraps(inner)
    def step(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        result = inner(optimizer, *args, **kwargs)
        groups = optimizer.param_groups
        if any(id(parameter) in mine for group in groups for parameter in group["params"]):
            found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
            infs = [inf.to(device, non_blocking=True) for inf in found.values()]
            model.step_skipped(torch.stack(infs).sum())
        return result

    scaler.step = step  # type: ignore[method-assign]
