# SPDX-License-Identifier: BSD-3-Clause
"""Counts the steps of one or several optimizers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

from torch.optim import Optimizer

# Wrappers of Accelerate and Lightning, whose steps are those of the optimizer inside. Others, such
# as Lookahead, change the parameters after these.
_DELEGATES = {"AcceleratedOptimizer", "LightningOptimizer", "_FabricOptimizer"}


class StepCounter:
    """Counts a step once each of the optimizers has taken or skipped one.

    Args:
        optimizers: Optimizers of one model.
        count: Function to call at each step that counts.
    """

    def __init__(self, optimizers: Sequence[Optimizer], count: Callable[[], None]) -> None:
        self.optimizers = optimizers
        self._count = count
        # The optimizers that have taken or skipped the next step.
        self._done: set[Optimizer] = set()
        self._heard = False  # whether an optimizer took a step in the scaler's step
        self._removals = [_call_after_steps(one, self._after_step) for one in optimizers]

    def skip(self, optimizer: Optimizer | None = None) -> None:
        """Counts a step that an optimizer did not take. None: all that have not taken it yet."""
        self._done.update(one for one in self.optimizers if optimizer in (None, one))
        if len(self._done) == len(self.optimizers):
            self._done.clear()
            self._count()

    def around_scaler(self, optimizer: Optimizer) -> Callable[[], None]:
        """Counts a step that the scaler skips, in which most optimizers' hooks don't run."""
        self._heard = False

        def count_skipped() -> None:
            if not self._heard and self.has(optimizer):
                self.skip(optimizer)

        return count_skipped

    @property
    def waits(self) -> bool:
        """Whether some of the optimizers, and not all, have taken or skipped the next step."""
        return bool(self._done)

    def has(self, optimizer: Optimizer) -> bool:
        return optimizer in self.optimizers

    def end(self) -> None:
        """Stops counting."""
        for remove in self._removals:
            remove()

    def _after_step(self, optimizer: Optimizer) -> None:
        self._heard = True
        self.skip(optimizer)


def delegate_of(optimizer: Any) -> Any:
    """Returns the optimizer whose steps are those of this one."""
    while _DELEGATES & {kind.__name__ for kind in type(optimizer).__mro__}:
        optimizer = optimizer.optimizer
    return optimizer


def _call_after_steps(
    optimizer: Optimizer, call: Callable[[Optimizer], None]
) -> Callable[[], None]:
    """Calls a function after each step. Returns a function that ends that."""
    if getattr(type(optimizer).step, "hooked", False):
        return optimizer.register_step_post_hook(lambda *_: call(optimizer)).remove
    # A wrapper that doesn't call Optimizer.__init__ has no hooks.
    inner, calls = optimizer.step, [call]

    @functools.wraps(inner)
    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        result = inner(*args, **kwargs)
        for each in calls:
            each(self)
        return result

    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
    return calls.clear
