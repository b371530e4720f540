# SPDX-License-Identifier: BSD-3-Clause
"""Mixed precision: an attached model follows the scale and the skipped steps of a GradScaler."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from torch_powersgd._core import _C


def follow(
    scaler: torch.amp.GradScaler, model: _C.ModelStates, parameters: Mapping[str, torch.Tensor]
) -> None:
    """Makes ``model``, which has these parameters, follow the scaler's scale and skipped steps.

    A scaler has no hooks, so this function wraps ``scale`` and ``step`` of this one object.
    """
    if scaler.is_enabled():
        _wrap_scale(scaler, model)
        _wrap_step(scaler, model, parameters)
        _wrap_getstate(scaler)


def _wrap_scale(scaler: torch.amp.GradScaler, model: _C.ModelStates) -> None:
    inner = scaler.scale

    @functools.wraps(inner)
    def scale(outputs: Any) -> Any:
        scaled = inner(outputs)
        # The device reads the scale, because the host would have to wait for it. The scaler makes
        # its tensor in the first scale() and changes it in update(). That comes after the
        # optimizer's step, which waits for the gradients: no reduction reads the tensor any more.
        if scaler._scale is not None:
            model.loss_scale = scaler._scale
        return scaled

    scaler.scale = scale  # type: ignore[method-assign]


def _wrap_step(
    scaler: torch.amp.GradScaler, model: _C.ModelStates, parameters: Mapping[str, torch.Tensor]
) -> None:
    inner = scaler.step
    device = next(iter(parameters.values())).device
    index = {name: i for i, name in enumerate(model.names)}
    index_of = {id(parameter): index[name] for name, parameter in parameters.items()}

    @functools.wraps(inner)
    def step(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        result = inner(optimizer, *args, **kwargs)
        held = [id(p) for group in optimizer.param_groups for p in group["params"]]
        if indices := [index_of[p] for p in held if p in index_of]:
            found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
            infs = [inf.to(device, non_blocking=True) for inf in found.values()]
            model.step_skipped(torch.stack(infs).sum(), indices)
        return result

    scaler.step = step  # type: ignore[method-assign]


def _wrap_getstate(scaler: torch.amp.GradScaler) -> None:
    inner = scaler.__getstate__

    # A copy has its own scale, and its model is another: ``attach`` makes that follow it.
    @functools.wraps(inner)
    def getstate() -> dict[str, Any]:
        wrapped = ("scale", "step", "__getstate__")
        return {name: value for name, value in inner().items() if name not in wrapped}

    scaler.__getstate__ = getstate  # type: ignore[method-assign]
