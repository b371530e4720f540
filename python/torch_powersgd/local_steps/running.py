# SPDX-License-Identifier: BSD-3-Clause
"""The local steps that have not ended, which hear of each optimizer's steps and of the exit."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Mapping
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)


class LocalSteps(Protocol):
    """What this module knows of ``LocalSGD``."""

    _trained: set[int]  # the ids of the parameters

    def _before_any_step(self, optimizer: Optimizer) -> None: ...

    def _after_any_step(self, optimizer: Optimizer) -> None: ...

    def _at_exit(self) -> None: ...


_running: WeakSet[LocalSteps] = WeakSet()
_registered = False


def begin(steps: LocalSteps) -> None:
    global _registered
    if not _registered:
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)
        _registered = True
    _running.add(steps)


def end(steps: LocalSteps) -> None:
    _running.discard(steps)


def takes_local_steps(parameters: Mapping[str, torch.Tensor]) -> str:
    """Returns the name of a parameter that takes local steps already, or nothing."""
    taken = _taken(parameters)
    if taken:
        gc.collect()  # Nobody may hold the others any more.
        taken = _taken(parameters)
    return taken


def _taken(parameters: Mapping[str, torch.Tensor]) -> str:
    ids = {p for steps in _running for p in steps._trained}
    return next((name for name, parameter in parameters.items() if id(parameter) in ids), "")


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not torch.compiler.is_compiling():
        for steps in list(_running):
            steps._before_any_step(optimizer)


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not torch.compiler.is_compiling():
        for steps in list(_running):
            steps._after_any_step(optimizer)


@atexit.register
def at_exit() -> None:
    for steps in list(_running):
        steps._at_exit()
