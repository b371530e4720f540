# SPDX-License-Identifier: BSD-3-Clause
"""What goes on around local steps: optimizers' steps, loads, DDP, and models that drift apart."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from torch_powersgd import grad_scaler, log
from torch_powersgd.local_steps import averaging
from torch_powersgd.local_steps.counting import StepCounter
from torch_powersgd.local_steps.fragment import Tensors, reshard
from torch_powersgd.local_steps.loads import Loads
from torch_powersgd.local_steps.rounds import Found, Rounds
from torch_powersgd.optimizer_steps import parameters_of, watch, watchers
from torch_powersgd.targets import shard_of

_ALLOWED = 20  # steps that don't count: optimizers that share a model take turns


class Watch:
    """What goes on around the rounds of a model, until ``end``.

    It counts the steps of the optimizers, keeps DDP from averaging, notices loads of the model, and
    warns of what makes the processes' models drift apart.

    Args:
        rounds: Rounds of the model.
        found: Model, and its parameters that take local steps.
        optimizers: Optimizers whose steps count.
        scaler: ``GradScaler`` of the training.

    Attributes:
        counter: Counter of the optimizers' steps.
        trained: The parameters.
    """

    def __init__(
        self,
        rounds: Rounds,
        found: Found,
        optimizers: Sequence[Optimizer],
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        self.trained = frozenset(found.trained.values())
        self._rounds, self._kind, self._group = rounds, rounds.kind, rounds.group
        self._model, self._loads = found.model, Loads(found.model, found.trained)
        self._largest = max(self.trained, key=torch.Tensor.numel)
        self._uncounted = 0  # optimizer steps since the last that counts
        self._had_step = self._knows_state = False
        self.counter = StepCounter(optimizers, self._count)
        self._warn_of_others(found.trained)
        watch(self)
        self._wrappers: set[DistributedDataParallel] = set()  # which average nothing
        self._stop_averaging()
        if scaler is not None:
            grad_scaler.around_step(scaler, self.counter.around_scaler)

    def end(self) -> None:
        """Stops watching. DDP averages again."""
        watchers.discard(self)
        self.counter.end()
        self._loads.end()
        for ddp in self._wrappers:
            averaging.go_on(ddp)

    def _count(self) -> None:
        if self not in watchers:
            return
        self._rounds.moved, self._uncounted = True, 0
        if self._loads.pending:  # and the step was skipped
            self._restart()
        self._loads.begin()
        if not self._had_step:
            self._had_step = True
            self._stop_averaging()
        if not self._knows_state:
            self._warn_of_weights()
        self._rounds.take_step()

    def loaded(self) -> None:
        """Notes that a state of the local steps was loaded: that of the model belongs to it."""
        self._loads.ignore()
        self._rounds.moved = True

    def _restart(self) -> None:
        """Continues from parameters that ``load_state_dict`` of the model has set. Collective.

        They are not taken for a movement of the local steps, which would be averaged.
        """
        reshard(self._model)
        self._loads.agree(self._kind, self._group)
        for fragment in self._rounds.fragments:
            fragment.restart()
        self._loads.begin()
        log.of(self._group).notice(f"{self._kind}: continues from the model that was loaded")

    def _stop_averaging(self) -> None:
        """Stops every DDP around the model. It may have been created after this object."""
        self._wrappers.update(averaging.wrappers_of(self.trained, self._group))
        for ddp in self._wrappers:
            averaging.stop(ddp)

    def _warn_of_weights(self) -> None:
        """Warns of optimizers that hold weights, by the state of the largest parameter."""
        for optimizer in self.counter.optimizers:
            state = optimizer.state.get(self._largest, {})
            self._knows_state |= bool(state)
            for key, value in state.items():
                if _is_near(value, self._largest):
                    self._warn(
                        f"{type(optimizer).__name__} holds weights of its own in its state "
                        f"{key!r}, which {self._kind} doesn't average. If its steps start from "
                        "them, they undo the averages: use an optimizer that holds none"
                    )

    def _warn_of_others(self, trained: Tensors) -> None:
        """Warns of parameters that only the model or only the optimizers hold."""
        own = {*self._model.parameters()}
        held = {p: None for each in self.counter.optimizers for p in parameters_of(each)}
        if untrained := [name for name, p in trained.items() if p not in held]:
            self._warn(
                f"the optimizer that {self._kind} was given does not hold {len(untrained)} of the "
                f"model's trainable parameters, the first of them {untrained[0]!r}. If another "
                "optimizer trains them, pass both as a list"
            )
        others = [list(p.shape) for p in held if p.requires_grad and p not in own]
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
        own = self.counter.has(optimizer)
        if (own and not self.counter.waits) or not self._trains(optimizer):
            return
        self._rounds.moved = True
        self._uncounted += 1
        if self._uncounted == _ALLOWED:
            self._warn(
                f"{self._kind} does not count the last {_ALLOWED} steps of an optimizer that "
                "trains its parameters, so nothing is averaged and the ranks drift apart. "
                + ("Another of its optimizers took no step" if own else "Pass that optimizer to it")
            )

    def at_exit(self) -> None:
        if self._rounds.moved:
            self._warn(
                f"{self._kind} has not ended, so the models of the ranks differ: call detach() "
                f"after the last step, or put the steps in a block, with {self._kind}(...):"
            )

    def _trains(self, optimizer: Optimizer) -> bool:
        return not self.trained.isdisjoint(parameters_of(optimizer))

    def _warn(self, message: str) -> None:
        if self._group.size() > 1:
            log.of(self._group).warning(message)


def _running() -> list[Watch]:
    return [watcher for watcher in watchers if isinstance(watcher, Watch)]


def takes_local_steps(parameters: Mapping[str, torch.Tensor]) -> str:
    """Returns the name of a parameter that takes local steps already, or nothing."""
    taken = _taken(parameters)
    if taken:
        gc.collect()  # Nobody may hold the others any more.
        taken = _taken(parameters)
    return taken


def _taken(parameters: Mapping[str, torch.Tensor]) -> str:
    taken = {parameter for running in _running() for parameter in running.trained}
    return next((name for name, parameter in parameters.items() if parameter in taken), "")


def _is_near(value: Any, parameter: torch.Tensor) -> bool:
    """Whether a value is a tensor that differs from the parameter by less than half its norm."""
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        return False
    mine, theirs = (shard_of(tensor.detach()).double() for tensor in (parameter, value))
    return bool((theirs - mine).norm() < mine.norm() / 2)


@atexit.register
def at_exit() -> None:
    for running in _running():
        running.at_exit()
