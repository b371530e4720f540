# SPDX-License-Identifier: BSD-3-Clause
"""Notices steps of optimizers that local steps do not count, such as one created after a load."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakSet

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

# Optimizers that share a model take turns, and only one of them is counted.
ALLOWED = 20

_watches: WeakSet[Watch] = WeakSet()
_registered = False


class Watch:
    """Counts steps of other optimizers than ``counted`` that train these parameters.

    Args:
        counted: Optimizer whose steps count.
        parameters: Parameters that must not be trained without it.
        missed: Called at each step that doesn't count, with the number of such steps in a row.
    """

    def __init__(
        self,
        counted: Optimizer,
        parameters: Iterable[torch.Tensor],
        missed: Callable[[int], None],
    ) -> None:
        global _registered
        if not _registered:
            register_optimizer_step_post_hook(_after_step)
            _registered = True
        self.counted, self.missed = counted, missed
        self.parameters = {id(parameter) for parameter in parameters}
        self.in_a_row = 0
        _watches.add(self)

    def after_step(self, optimizer: Optimizer) -> None:
        if optimizer is self.counted:
            self.in_a_row = 0
        elif self._is_trained_by(optimizer):
            self.in_a_row += 1
            self.missed(self.in_a_row)

    def _is_trained_by(self, optimizer: Optimizer) -> bool:
        held = (parameter for group in optimizer.param_groups for parameter in group["params"])
        return any(id(parameter) in self.parameters for parameter in held)

    def end(self) -> None:
        _watches.discard(self)


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not torch.compiler.is_compiling():
        for watch in list(_watches):
            watch.after_step(optimizer)
