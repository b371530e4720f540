# SPDX-License-Identifier: BSD-3-Clause
"""The steps of all optimizers, for what must know when parameters move.

torch calls hooks for every optimizer of the process, so one pair of them serves all watchers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)


class Watcher(Protocol):
    """What ``watch`` takes. A compiled step calls none of its methods."""

    def before_step(self, optimizer: Optimizer) -> None: ...

    def after_step(self, optimizer: Optimizer) -> None: ...


watchers: WeakSet[Watcher] = WeakSet()
_registered = False


def watch(watcher: Watcher) -> None:
    """Calls the watcher's methods around each step, as long as it is in ``watchers``."""
    global _registered
    if not _registered:
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)
        _registered = True
    watchers.add(watcher)


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not torch.compiler.is_compiling():
        for watcher in list(watchers):
            watcher.before_step(optimizer)


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not torch.compiler.is_compiling():
        for watcher in list(watchers):
            watcher.after_step(optimizer)


def parameters_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Returns the parameters that an optimizer holds."""
    for group in optimizer.param_groups:
        yield from group["params"]
