# SPDX-License-Identifier: BSD-3-Clause
"""Mixed precision: residuals follow the scale and the skipped steps of a GradScaler.

A scaler has no hooks, so this module wraps ``scale`` and ``step`` of the one object, once, and
calls listeners. A scaler may outlive many models: a listener whose object is gone is forgotten.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakMethod, ref

import torch
from torch.optim import Optimizer

from torch_powersgd._core import _C
from torch_powersgd.optimizer_steps import parameters_of

# Called with the first argument of ``scale`` or ``step``. It returns what to call afterwards, or
# None if its object is gone.
After = Callable[[], None]
Listener = Callable[[Any], After | None]


@dataclass
class _Listeners:
    scale: list[Listener] = field(default_factory=list)
    step: list[Listener] = field(default_factory=list)


_wrapped: WeakKeyDictionary[torch.amp.GradScaler, _Listeners] = WeakKeyDictionary()


def follow(
    scaler: torch.amp.GradScaler, reducer: _C.BucketReducer, index: dict[torch.Tensor, int]
) -> None:
    """Makes the reducer of these parameters follow the scaler's scale and skipped steps."""
    if not scaler.is_enabled():
        return
    device = next(iter(index)).device
    # The scaler, which keeps the index, may outlive the model.
    reference, owner = ref(reducer, lambda _: index.clear()), ref(scaler)

    def note_scale() -> None:
        # The device reads the scale, because the host would have to synchronize. The scaler creates
        # the tensor in the first scale() and changes it in update(), after the optimizer's step,
        # which waits for the gradients. By then no reduction reads the tensor.
        found, of = reference(), owner()
        if found is not None and of is not None and of._scale is not None:
            found.states.loss_scale = of._scale

    def note_skipped(optimizer: Optimizer) -> None:
        found, of = reference(), owner()
        indices = [index[p] for p in parameters_of(optimizer) if p in index]
        if found is not None and of is not None and indices:
            infs = of._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()
            total = torch.stack([inf.to(device, non_blocking=True) for inf in infs]).sum()
            found.states.step_skipped(total, indices)

    def lives() -> bool:
        return reference() is not None

    listeners = _listeners_of(scaler)
    listeners.scale.append(lambda outputs: note_scale if lives() else None)
    listeners.step.append(lambda optimizer: partial(note_skipped, optimizer) if lives() else None)


def around_step(scaler: torch.amp.GradScaler, method: Callable[[Optimizer], After]) -> None:
    """Calls a method before each ``scaler.step``, and what it returns afterwards.

    It gets the optimizer, whose step the scaler may skip. The calls end with the method's object.
    """
    reference = WeakMethod(method)

    def listener(optimizer: Optimizer) -> After | None:
        found = reference()
        return None if found is None else found(optimizer)

    _listeners_of(scaler).step.append(listener)


def _listeners_of(scaler: torch.amp.GradScaler) -> _Listeners:
    if scaler not in _wrapped:
        _wrapped[scaler] = _Listeners()
        _wrap(scaler, _wrapped[scaler])
    return _wrapped[scaler]


def _wrap(scaler: torch.amp.GradScaler, listeners: _Listeners) -> None:
    inner = {name: getattr(scaler, name) for name in ("scale", "step", "__getstate__")}

    def with_listeners(name: str, called: list[Listener]) -> Callable[..., Any]:
        @functools.wraps(inner[name])
        def method(*args: Any, **kwargs: Any) -> Any:
            first = next(iter((*args, *kwargs.values())), None)
            after = [(listener, listener(first)) for listener in called]
            called[:] = [listener for listener, call in after if call is not None]
            result = inner[name](*args, **kwargs)
            for _, call in after:
                if call is not None:
                    call()
            return result

        return method

    # A copy has its own scale and another model, which ``attach`` makes follow it.
    @functools.wraps(inner["__getstate__"])
    def getstate() -> dict[str, Any]:
        return {name: value for name, value in inner["__getstate__"]().items() if name not in inner}

    scaler.scale = with_listeners("scale", listeners.scale)  # type: ignore[method-assign]
    scaler.step = with_listeners("step", listeners.step)  # type: ignore[method-assign]
    scaler.__getstate__ = getstate  # type: ignore[method-assign]
