# SPDX-License-Identifier: BSD-3-Clause
"""The local steps that have not ended, which hear of each optimizer's steps and of the exit."""

from __future__ import annotations

import atexit
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook


class LocalSteps(Protocol):
    """What this module knows of ``LocalSGD``."""

    optimizer: Optimizer

    def _after_any_step(self, optimizer: Optimizer) -> None: ...

    def _at_exit(self) -> None: ...


_running: WeakSet[LocalSteps] = WeakSet()
_registered = False


def begin(steps: LocalSteps) -> None:
    global _registered
    if not _registered:
        register_optimizer_step_post_hook(_after_step)
        _registered = True
    _running.add(steps)


def end(steps: LocalSteps) -> None:
    _running.discard(steps)


def takes_local_steps(optimizer: Optimizer) -> bool:
    return any(steps.optimizer is optimizer for steps in _running)


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not torch.compiler.is_compiling():
        for steps in list(_running):
            steps._after_any_step(optimizer)


@atexit.register
def at_exit() -> None:
    for steps in list(_running):
        steps._at_exit()
