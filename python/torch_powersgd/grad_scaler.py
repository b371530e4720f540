# SPDX-License-Identifier: BSD-3-Clause
"""Mixed precision: residuals follow the scale and the skipped steps of a GradScaler."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakMethod, ref

import torch

from torch_powersgd._core import _C


def follow(
    scaler: torch.amp.GradScaler, reducer: _C.BucketReducer, parameters: Mapping[str, torch.Tensor]
) -> None:
    """Makes ``reducer``, which has these parameters, follow the scaler's scale and skipped steps.

    A scaler has no hooks, so this function wraps ``scale`` and ``step`` of this one object.
    """
    if scaler.is_enabled():
        index = {name: i for i, name in enumerate(reducer.states.names)}
        index_of = {id(parameter): index[name] for name, parameter in parameters.items()}
        device = next(iter(parameters.values())).device
        reference = ref(reducer)  # The scaler may outlive the module.
        _wrap_scale(scaler, reference)
        _follow_steps(scaler, reference, index_of, device)


def call_after_step(
    scaler: torch.amp.GradScaler, call: Callable[[torch.optim.Optimizer], None]
) -> None:
    """Calls a function with the optimizer after each ``scaler.step``, even if it skips the step.

    This wraps ``step`` of this one object.
    """
    inner = scaler.step

    @functools.wraps(inner)
    def step(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        result = inner(optimizer, *args, **kwargs)
        call(optimizer)
        return result

    scaler.step = step  # type: ignore[method-assign]
    _wrap_getstate(scaler)


def weakly(
    method: Callable[[torch.optim.Optimizer], None],
) -> Callable[[torch.optim.Optimizer], None]:
    """Returns a function that calls the method while its object lives. A scaler may outlive it."""
    reference = WeakMethod(method)

    def call(optimizer: torch.optim.Optimizer) -> None:
        if (found := reference()) is not None:
            found(optimizer)

    return call


def _wrap_scale(scaler: torch.amp.GradScaler, reference: ref[_C.BucketReducer]) -> None:
    inner = scaler.scale

    @functools.wraps(inner)
    def scale(outputs: Any) -> Any:
        scaled = inner(outputs)
        # The device reads the scale, because the host would have to synchronize. The scaler creates
        # the tensor in the first scale() and changes it in update(), after the optimizer's step,
        # which waits for the gradients. By then no reduction reads the tensor.
        if (reducer := reference()) is not None and scaler._scale is not None:
            reducer.states.loss_scale = scaler._scale
        return scaled

    scaler.scale = scale  # type: ignore[method-assign]


def _follow_steps(
    scaler: torch.amp.GradScaler,
    reference: ref[_C.BucketReducer],
    index_of: Mapping[int, int],
    device: torch.device,
) -> None:
    def note_skipped(optimizer: torch.optim.Optimizer) -> None:
        if (reducer := reference()) is None:
            return
        held = [id(p) for group in optimizer.param_groups for p in group["params"]]
        if indices := [index_of[p] for p in held if p in index_of]:
            found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
            infs = [inf.to(device, non_blocking=True) for inf in found.values()]
            reducer.states.step_skipped(torch.stack(infs).sum(), indices)

    call_after_step(scaler, note_skipped)


def _wrap_getstate(scaler: torch.amp.GradScaler) -> None:
    inner = scaler.__getstate__

    # A copy has its own scale and another model, which ``attach`` makes follow it.
    @functools.wraps(inner)
    def getstate() -> dict[str, Any]:
        wrapped = ("scale", "step", "__getstate__")
        return {name: value for name, value in inner().items() if name not in wrapped}

    scaler.__getstate__ = getstate  # type: ignore[method-assign]
