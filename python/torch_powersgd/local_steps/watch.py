# SPDX-License-Identifier: BSD-3-Clause
"""Watches all optimizers' steps while local steps run, and warns of models that drift apart."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from torch_powersgd import log
from torch_powersgd.local_steps.counting import StepCounter
from torch_powersgd.local_steps.fragment import Tensors
from torch_powersgd.local_steps.loads import Loads
from torch_powersgd.reduction_checks import parameters_of
from torch_powersgd.targets import shard_of

_ALLOWED = 20  # steps that don't count: optimizers that share a model take turns


class Watch:
    """The warnings of one ``LocalSGD``.

    Args:
        kind: Name of its class, for messages.
        group: Group that averages.
        model: Model that takes the local steps.
        trained: Its parameters that do.
        counter: Counter of its optimizers' steps.
        loads: What was loaded into the model.
        restart: Function to call before a step that moves them after a load.

    Attributes:
        moved: Whether a step was taken since the parameters were last equal.
    """

    def __init__(
        self,
        kind: str,
        group: dist.ProcessGroup,
        model: torch.nn.Module,
        trained: Tensors,
        counter: StepCounter,
        loads: Loads,
        restart: Callable[[], None],
    ) -> None:
        global _registered
        if not _registered:
            register_optimizer_step_pre_hook(_before_step)
            register_optimizer_step_post_hook(_after_step)
            _registered = True
        self.moved = False
        self.trained = {id(parameter) for parameter in trained.values()}
        self._kind, self._model = kind, model
        self._log, self._alone = log.of(group), group.size() == 1
        self._largest = max(trained.values(), key=torch.Tensor.numel)
        self._counter, self._loads, self._restart = counter, loads, restart
        self._uncounted = 0  # optimizer steps since the last that counts
        self._had_round = False
        self._warn_of_others()
        _running.add(self)

    def end(self) -> None:
        """Stops watching."""
        _running.discard(self)

    def counted(self) -> None:
        """Notes a step that counts."""
        self.moved, self._uncounted = True, 0

    def before_round(self) -> None:
        """Raises a RuntimeError if a parameter that was not trained at first is trained now."""
        if not self._had_round:
            self._had_round = True
            self._warn_of_weights()
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and parameter.numel() and id(parameter) not in self.trained:
                raise RuntimeError(
                    f"{name!r} was frozen or missing when {self._kind} was created but is trained "
                    f"now, so it is not averaged. Call detach() and create {self._kind} again"
                )

    def _warn_of_weights(self) -> None:
        """Warns of optimizers that hold weights, by the state of the largest parameter."""
        for optimizer in self._counter.optimizers:
            for key, value in optimizer.state.get(self._largest, {}).items():
                if _is_near(value, self._largest):
                    self._warn(
                        f"{type(optimizer).__name__} holds weights of its own in its state "
                        f"{key!r}, which {self._kind} doesn't average. If its steps start from "
                        "them, they undo the averages: use an optimizer that holds none"
                    )

    def _warn_of_others(self) -> None:
        """Warns of parameters that the optimizers train but that are not in the model."""
        own = {id(parameter) for parameter in self._model.parameters()}
        held = (p for optimizer in self._counter.optimizers for p in parameters_of(optimizer))
        others = [list(p.shape) for p in held if p.requires_grad and id(p) not in own]
        if others:
            self._warn(
                f"{len(others)} parameters of the optimizer, the first of shape {others[0]}, are "
                f"not in the model that {self._kind} was given, so they are not averaged. If "
                "nothing else does that, pass a module that holds them as well"
            )

    def before_step(self, optimizer: Optimizer) -> None:
        if self._loads.pending and self._trains(optimizer):
            self._restart()

    def after_step(self, optimizer: Optimizer) -> None:
        """Notices steps that do not count, as of an optimizer that was created after a load."""
        own = self._counter.has(optimizer)
        if (own and not self._counter.waits) or not self._trains(optimizer):
            return
        self.moved = True
        self._uncounted += 1
        if self._uncounted == _ALLOWED:
            self._warn(
                f"{self._kind} does not count the last {_ALLOWED} steps of an optimizer that "
                "trains its parameters, so nothing is averaged and the ranks drift apart. "
                + ("Another of its optimizers took no step" if own else "Pass that optimizer to it")
            )

    def at_exit(self) -> None:
        if self.moved:
            self._warn(
                f"{self._kind} has not ended, so the models of the ranks differ: call detach() "
                f"after the last step, or put the steps in a block, with {self._kind}(...):"
            )

    def _trains(self, optimizer: Optimizer) -> bool:
        return any(id(parameter) in self.trained for parameter in parameters_of(optimizer))

    def _warn(self, message: str) -> None:
        if not self._alone:
            self._log.warning(message)


_running: WeakSet[Watch] = WeakSet()
_registered = False


def takes_local_steps(parameters: Mapping[str, torch.Tensor]) -> str:
    """Returns the name of a parameter that takes local steps already, or nothing."""
    taken = _taken(parameters)
    if taken:
        gc.collect()  # Nobody may hold the others any more.
        taken = _taken(parameters)
    return taken


def _taken(parameters: Mapping[str, torch.Tensor]) -> str:
    ids = {p for watch in _running for p in watch.trained}
    return next((name for name, parameter in parameters.items() if id(parameter) in ids), "")


def _is_near(value: Any, parameter: torch.Tensor) -> bool:
    """Whether a value is a tensor that differs from the parameter by less than half its norm."""
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        return False
    mine, theirs = (shard_of(tensor.detach()).double() for tensor in (parameter, value))
    return bool((theirs - mine).norm() < mine.norm() / 2)


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not torch.compiler.is_compiling():
        for watch in list(_running):
            watch.before_step(optimizer)


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not torch.compiler.is_compiling():
        for watch in list(_running):
            watch.after_step(optimizer)


@atexit.register
def at_exit() -> None:
    for watch in list(_running):
        watch.at_exit()
